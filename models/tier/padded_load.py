"""From a folder to a model that transformers computes with a cache of its own."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenpod.core.own_state import OwnState
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.nested import Nesting, TextTensors
from tokenpod.models.decoders.facts import ends_within
from tokenpod.models.layers.reading import Progress
from tokenpod.models.tier.check import TOKENS, check_text
from tokenpod.models.tier.classes import config_of, max_positions, model_class
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.halves import Halves
from tokenpod.models.tier.load import made_on_meta, widest_of
from tokenpod.models.tier.padded import Cached, PaddedModel
from tokenpod.models.tier.padded_check import LONG, AtOnce, Trials, running
from tokenpod.models.tier.spec import TierSpec
from tokenpod.models.tier.trees import tensor_bytes
from tokenpod.models.tier.weights import load_weights


class PaddedLoader:
    """One config.json's model; see `TierLoader` for arguments and what they raise."""

    def __init__(
        self,
        architecture: str,
        fields: Fields,
        nesting: Nesting | None = None,
        *,
        dtype: torch.dtype | None,
        eos_token_ids: frozenset[int],
        served: int | None,
    ) -> None:
        self.fields, self._nesting = fields, nesting
        self._class = model_class(architecture)
        self._config = config_of(self._class, fields)
        positions = max_positions(self._config, served)
        model = made_on_meta(self._class, self._config)
        #: Numbers in all weights.
        self.numbers = sum(weight.numel() for weight in model.parameters())
        cached = Cached(Halves(model), _first_token(model.config))
        head = model.get_output_embeddings()
        if head is None:
            raise NotServed("its class has no head")
        vocabulary, hidden = head.weight.shape
        #: Without the states' sizes, which are seen once it is loaded.
        self.spec = TierSpec(
            architecture=fields.texts("architectures")[0],
            vocab_size=vocabulary,
            hidden_size=hidden,
            max_positions=positions,
            widest=widest_of(model),
            kv_layouts=(),
            head_counts=(),
            windows=(None,),
            dtype=dtype,
            eos_token_ids=ends_within(eos_token_ids, vocabulary),
            own_state=OwnState(0, 0, scores_prompts=not cached.encodes),
        )

    def state_of(self, dtype: torch.dtype) -> OwnState:
        """What a row's state takes, seen without any numbers.

        Raises NotServed if the class looks at numbers on its way.
        """
        with running("without numbers"), torch.inference_mode(), FakeTensorMode():
            model = (
                cast(Any, self._class)._from_config(copy.deepcopy(self._config), dtype=dtype).eval()
            )
            model.config._experts_implementation = "batched_mm"
            cached = Cached(Halves(model), _first_token(model.config))
            return _sizes(cached, torch.zeros(TOKENS, dtype=torch.int64))

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Operations,
        progress: Progress,
    ) -> PaddedModel:
        """The model, checked; see `TierLoader.load`."""
        tensors = TextTensors(checkpoint, self._nesting)
        model = load_weights(self._class, self._config, tensors, dtype, progress).to(device)
        padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        length = max(min(LONG, self.spec.max_positions), TOKENS)
        tokens = check_text(self.spec.vocab_size, padding, device, length)
        start = _first_token(model.config)
        with torch.inference_mode():
            cached = Cached(Halves(model), start)
            with running("with its cache"):
                size = _sizes(cached, tokens[:TOKENS])
            cached.grows = size.token_bytes > 0
            spec, at_once = self.spec.with_state(size), AtOnce(model, start)
            can = Trials(spec, cached, ops, tokens, at_once).abilities()
        return PaddedModel(self.spec.with_state(size), cached, ops, can, tensors.unused)


def _first_token(config: Any) -> int | None:
    """What a decoder begins with; None without an encoder. Raises NotServed if nobody says it."""
    if not config.is_encoder_decoder:
        return None
    found = getattr(config, "decoder_start_token_id", None)
    if not isinstance(found, int):
        raise NotServed("config.json has no decoder_start_token_id")
    return found


def _sizes(cached: Cached, tokens: torch.Tensor) -> OwnState:
    """What a row's state takes, seen at two lengths of prompts and of what follows them."""
    few, many = 2, TOKENS

    def size(prompt: int, length: int) -> int:
        return tensor_bytes(cached.whole(tokens[:length], prompt)[1])

    least = size(few, few)
    grown = size(many, many) - least
    if cached.encodes:
        grown = max(grown, size(few, many) - least)
    token = -(-grown // (many - few))
    row = max(least - token * few, 0)
    return OwnState(row, token, scores_prompts=not cached.encodes)
