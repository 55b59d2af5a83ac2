"""A draft model: a small one beside the served one, which guesses what that says next.

    propose   k small steps: of rows with drafts, the last token and then draft after draft
    follow    every step's tokens, after the served model has computed them

Its keys and values lie at the slots of the served model's, in a pool of its own. As it follows all
steps (prompts, single tokens, drafts once more), a slot that is written in one pool is written in
the other: prefixes, copies and preemption need to know nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import MTP, EngineOptions
from tokenpod.engine.drafts.head_draft import HeadDraft
from tokenpod.engine.drafts.parallel_draft import ParallelDraft
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.executor import CapturableModel, Model
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch, RaggedRows, TileKind
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.decoders.facts import LoadedModel, ModelFacts
from tokenpod.models.eagle import EagleHead, is_eagle, load_eagle
from tokenpod.models.folder import read_config
from tokenpod.models.load import load_model
from tokenpod.models.medusa import MedusaHeads, is_medusa, load_medusa
from tokenpod.models.mtp import MtpHead, load_mtp

#: Tokens by which vocabularies of one tokenizer may differ, for the sake of even shapes.
_PADDING = 1024


#: What `load_draft` loads.
DraftModel = LoadedModel | EagleHead | MtpHead | MedusaHeads


@dataclass(slots=True)
class SmallModel:
    """A draft model of a family of ours; see `Drafter`.

    Args:
        model: whole on every rank.
        pool: with as many slots as the served model's.
        vocabulary: tokens that the draft model has; those beyond are never drafted.
        wanted: tokens of the served model.
        most: drafts of one row in a step.
    """

    model: CapturableModel
    pool: KVPool
    vocabulary: int
    wanted: int
    most: int
    each: int = 1
    behind: bool = False
    #: Where captured steps have the draft model's part: beside the served model's.
    _beside: torch.cuda.Stream | None = None

    def compute(
        self,
        served: Model,
        batch: ForwardBatch,
        pool: KVPool,
        own: ForwardBatch,
        *,
        follow: bool = True,
    ) -> torch.Tensor:
        """Run a step of the served model, [T, hidden]; the draft follows it, now or by `follow`."""
        if not (follow and own.t_slot.is_cuda and torch.cuda.is_current_stream_capturing()):
            hidden = served.forward(batch, pool)
            if follow:
                self.follow(own)
            return hidden
        # The draft model's kernels are many and small, and neither model reads what the other
        # writes: as a branch of the graph they run while the served model's read weights.
        self._beside = self._beside or torch.cuda.Stream(own.t_slot.device)  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            self.follow(own)
        hidden = served.forward(batch, pool)
        here.wait_stream(self._beside)
        return hidden

    def follow(self, own: ForwardBatch) -> None:
        """Compute the draft model over the tokens of a step that has been computed."""
        self.model.forward(self._own(own), self.pool)

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps describe rows with several tokens, to both models."""
        return self.model.prepare_capture(rows)

    def tile_rows(self, rows: RaggedRows) -> RaggedRows:
        """A step's rows as the draft model's own tiles are to have them."""
        return rows

    def logits(self, batch: ForwardBatch, drafts: int) -> torch.Tensor:
        """[n, vocabulary] what may follow the tokens of a small step."""
        assert drafts == 1
        batch = self._own(batch)
        found = self.model.logits(self.model.forward(batch, self.pool), batch)[:, : self.wanted]
        if found.shape[1] == self.wanted:
            return found
        return pad(found, (0, self.wanted - found.shape[1]), value=-torch.inf)

    def _own(self, batch: ForwardBatch) -> ForwardBatch:
        """The step without what is the served model's alone: adapters, given embeddings and their
        positions.
        """
        t_token = batch.t_token
        if self.vocabulary < self.wanted:  # ids without a text, which only padding or chance bring
            t_token = t_token.clamp(max=self.vocabulary - 1)
        return replace(
            batch, t_token=t_token, given=None, t_adapter=None, adapters=None, t_own_position=None
        )


def load_draft(
    options: EngineOptions, served: LoadedModel, positions: int, device: torch.device
) -> DraftModel | None:
    """The draft model or head that the options name, in the served model's dtype; None: none.

    `positions`: tokens of the longest sequence. Raises EngineError with one line for what can't
    draft for the served model.
    """
    if options.draft_folder is None:
        return None
    folder = Path(options.draft_folder)
    try:
        if options.draft_folder == MTP:
            return load_mtp(
                Path(options.model_folder),
                _of_ours(served),
                positions=positions,
                device=device,
                quantize=options.quantize,
                override=json.loads(options.config_override or "{}"),
                require_manifest=options.require_manifest,
            )
        if is_medusa(folder):
            return load_medusa(
                folder,
                _of_ours(served),
                heads=options.speculate,
                device=device,
                require_manifest=options.require_manifest,
            )
        if is_eagle(folder):
            return load_eagle(
                folder,
                _of_ours(served),
                positions=positions,
                device=device,
                require_manifest=options.require_manifest,
            )
        facts = read_config(folder)
        problem = _problem(facts, served, positions)
        if problem is None:
            return load_model(
                folder,
                dtype=served.dtype,
                device=device,
                progress=lambda done, total: None,
                max_total_tokens=positions,
                require_manifest=options.require_manifest,
            )
    except ModelError as error:
        problem = str(error)
    raise EngineError(f"draft_model is {folder}: {problem}")


def _of_ours(served: LoadedModel) -> Decoder:
    if not isinstance(served, Decoder):
        raise ModelError(
            f"a head reads what the served model does, and {served.config.architecture} is computed"
            f" by {served.config.runs_on}"
        )
    return served


def _problem(facts: ModelFacts, served: LoadedModel, positions: int) -> str | None:
    """Why a model can't draft for the served one; None: it can."""
    if facts.runs_on != "tokenpod":
        return f"{facts.architecture} is computed by {facts.runs_on}, and can't draft"
    if facts.own_state is not None:
        return f"{facts.architecture} keeps a state for each row, and can't draft"
    if facts.max_positions < positions:
        return (
            f"its context has {facts.max_positions} tokens, and sequences may have {positions} "
            "(--max-total-tokens)"
        )
    # Files of one tokenizer are padded differently; more are other tokenizers'.
    more, fewer = facts.vocab_size, served.config.vocab_size
    if abs(more - fewer) > _PADDING:
        return f"its vocabulary has {more} tokens, and that of the served model {fewer}"
    return None


def draft_of(model: DraftModel, served: LoadedModel, pool: KVPool, most: int, rows: int) -> Drafter:
    """What an executor of so many rows drafts with: a model that `load_draft` has loaded."""
    if isinstance(model, MedusaHeads):
        assert isinstance(served, Decoder)
        return ParallelDraft(model, pool, most, rows, served.device)
    if isinstance(model, EagleHead | MtpHead):
        return HeadDraft(model, pool, most)
    assert isinstance(model, Decoder)
    return SmallModel(model, pool, model.config.vocab_size, served.config.vocab_size, most)


@dataclass(frozen=True, slots=True)
class BothTiles:
    """What captured steps say of rows with several tokens, for two models of unlike heads."""

    served: StepTiles
    draft: StepTiles
    #: The step's rows as those of the draft model are to have them.
    own_rows: Callable[[RaggedRows], RaggedRows]

    def count(self, tokens: int) -> int:
        """Numbers of the tiles of both models, for steps of so many tokens."""
        return self.served.count(tokens) + self.draft.count(tokens)

    def fill(self, rows: RaggedRows, into: npt.NDArray[np.int32]) -> bool:
        """Write the tiles of both models; False: they don't fit."""
        at = self._cut(len(into))
        own = self.own_rows(rows)
        return self.served.fill(rows, into[:at]) and self.draft.fill(own, into[at:])

    def by_kind(self, numbers: torch.Tensor) -> Mapping[TileKind, torch.Tensor]:
        """The served model's numbers, by kind of tile."""
        return self.served.by_kind(numbers[: self._cut(len(numbers))])

    def of_draft(self, numbers: torch.Tensor) -> Mapping[TileKind, torch.Tensor]:
        """The same of the draft model."""
        return self.draft.by_kind(numbers[self._cut(len(numbers)) :])

    def _cut(self, numbers: int) -> int:
        """Both have room for as many tiles, so their parts are as one token's are."""
        served, draft = self.served.count(0), self.draft.count(0)
        return numbers * served // max(served + draft, 1)
