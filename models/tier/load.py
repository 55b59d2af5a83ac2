"""From a folder to a model that transformers computes; its tensors come through our reader."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.checkpoints.nested import Nesting, TextTensors
from tokenpod.models.decoders.facts import ends_within
from tokenpod.models.layers.reading import Progress
from tokenpod.models.tier.check import TOKENS, check, check_text, difference
from tokenpod.models.tier.classes import check_stateless, config_of, max_positions, model_class
from tokenpod.models.tier.dispatch import Dispatch, Recorder, without_chunks
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.halves import Halves
from tokenpod.models.tier.model import Hosted, TierModel, hidden_of
from tokenpod.models.tier.spec import TierSpec
from tokenpod.models.tier.weights import load_weights


class TierLoader:
    """One config.json's model: what is known of it, its size, and the model itself.

    Args:
        architecture: a class of transformers' causal models.
        fields: config.json, or the part of it that the class reads, but for `architectures`.
        nesting: where its tensors are, if it is part of a model.
        dtype: that the checkpoint says it has.
        eos_token_ids: that end a text.
        served: the longest text that will be served, in tokens; None: what the model can.

    Raises:
        NotServed: transformers has no such model, or one that can't run here.
    """

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
        check_stateless(self._class, self._config)
        positions = max_positions(self._config, served)
        self._served = min(positions, served or positions)
        model = made_on_meta(self._class, self._config)
        #: Numbers in all weights.
        self.numbers = sum(weight.numel() for weight in model.parameters())
        dispatches = record(Halves(model), Hosted(), self._served)
        #: Without layouts of keys and values where only the weights' numbers show them.
        self.spec = spec_of(
            fields.texts("architectures")[0],
            model,
            dispatches,
            positions,
            dtype=dtype,
            eos_token_ids=eos_token_ids,
        )

    def state_of(self, dtype: torch.dtype) -> None:
        """It keeps all of a sequence in the pool's slots."""
        del dtype

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Operations,
        progress: Progress,
    ) -> TierModel:
        """The model, checked.

        Raises:
            ModelError: config.json and tensors don't belong together.
            NotServed: the model does not pass the check, or needs what the device has not.
        """
        tensors = TextTensors(checkpoint, self._nesting)
        model = load_weights(self._class, self._config, tensors, dtype, progress).to(device)
        tokens = check_text(self.spec.vocab_size, None, device)
        with torch.inference_mode():
            truth, noise = _by_transformers(model, tokens)
            halves, hosted = Halves(model), Hosted()
            dispatches = record(halves, hosted, self._served)
            chunks = {d.reach.chunk for d in dispatches if d.reach.chunk is not None}
            if chunks and device.type != "cpu":
                raise NotServed(
                    f"texts of {self._served} tokens are to be served, and its attention is in "
                    f"chunks of {min(chunks)}: on a GPU, set --max-total-tokens {min(chunks)}"
                )
            spec = spec_of(
                self.spec.architecture,
                model,
                dispatches,
                self.spec.max_positions,
                dtype=self.spec.dtype,
                eos_token_ids=self.spec.eos_token_ids,
            )
            served = TierModel(spec, halves, hosted, dispatches, ops, tensors.unused)
            check(served, truth, tokens, noise)
        return served


def _by_transformers(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """[TOKENS, vocabulary] logits, and how far those of its two kinds of attention differ."""
    at = torch.arange(len(tokens), device=tokens.device)[None]
    said = []
    for name in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        model.config._attn_implementation = name
        try:
            said.append(model(input_ids=tokens[None], position_ids=at, use_cache=False).logits[0])
        except ValueError:  # that kind lacks something that the model needs
            if name == "eager":
                raise
    return said[0], difference(said[-1], said[0])


def spec_of(
    architecture: str,
    model: Any,
    dispatches: tuple[Dispatch, ...],
    positions: int,
    *,
    dtype: torch.dtype | None,
    eos_token_ids: frozenset[int],
) -> TierSpec:
    """What is known of a model whose calls of attention are known."""
    text = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    vocabulary = text.vocab_size if head is None else head.weight.shape[0]
    layers = [dispatch for dispatch in dispatches if dispatch.stores]
    return TierSpec(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=text.hidden_size,
        max_positions=positions,
        widest=widest_of(model),
        kv_layouts=tuple(dispatch.kv for dispatch in layers),
        head_counts=tuple(dispatch.heads for dispatch in layers),
        windows=tuple(dispatch.reach.window for dispatch in layers),
        dtype=dtype,
        eos_token_ids=ends_within(eos_token_ids, vocabulary),
    )


def made_on_meta(found: type[PreTrainedModel], config: PreTrainedConfig) -> Any:
    """The model without numbers."""
    try:
        with torch.device("meta"):
            model = cast(Any, found)(copy.deepcopy(config)).eval()
        # The only one whose shapes don't follow from what tokens choose. It copies an expert's
        # weights for each token: what serves has another, so the config is not the caller's.
        model.config._experts_implementation = "batched_mm"
        return model
    except Exception as error:  # whatever a class does with a config that can't be
        raise NotServed(f"transformers can't make it ({_one_line(error)})") from None


def record(halves: Halves, hosted: Hosted, served: int) -> tuple[Dispatch, ...]:
    """What a model's calls of attention are, for texts of up to `served` tokens.

    Empty on the meta device, if the model looks at numbers on its way. Raises NotServed if there
    are no calls, or our attention does not know how to answer one.
    """
    recorder, model = Recorder(), halves.model
    if "position_ids" not in halves.arguments:
        raise NotServed("its base model can't be told positions")
    tokens = torch.arange(TOKENS, device=model.device)
    model.config._attn_implementation = hosted.recording
    try:
        with torch.inference_mode(), hosted.answering(recorder):
            hidden_of(halves, tokens, tokens)
    except NotServed:
        raise
    except Exception as error:  # whatever a model does with arguments that it does not expect
        if "meta" in str(error):
            return ()
        raise NotServed(
            f"its code can't run over one row of several texts ({_one_line(error)})"
        ) from None
    finally:
        model.config._attn_implementation = hosted.running
    if not recorder.dispatches:
        raise NotServed("its layers don't call the attention function")
    return tuple(without_chunks(dispatch, served) for dispatch in recorder.dispatches)


def widest_of(model: Any) -> int:
    """Features that a token has between two products, at most, over all its experts."""
    text = model.config.get_text_config(decoder=True)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    tables = {id(module.weight) for module in (model.get_input_embeddings(),) if module}
    head = model.get_output_embeddings()
    if head is not None:
        tables.add(id(head.weight))
    widths: list[int] = [
        weight.shape[0] if weight.ndim == 2 else max(weight.shape[-2:]) * chosen
        for weight in model.parameters()
        if weight.ndim > 1 and id(weight) not in tables
    ]
    if not widths:
        raise NotServed("its config.json has no layers")
    return max(widths)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
