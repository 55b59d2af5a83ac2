"""A draft model: a small one beside the served one, which guesses what that says next.

    propose   k small steps: of rows with drafts, the last token and then draft after draft
    follow    every step's tokens, after the served model has computed them

Its keys and values lie at the slots of the served model's, in a pool of its own. As it follows all
steps (prompts, single tokens, drafts once more), a slot that is written in one pool is written in
the other: prefixes, copies and preemption need to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.executor import CapturableModel
from tokenpod.kernels.attention_ops import StepTiles
from tokenpod.kernels.batch import ForwardBatch, RaggedRows
from tokenpod.kernels.pool import KVPool
from tokenpod.models.errors import ModelError
from tokenpod.models.facts import LoadedModel, ModelFacts
from tokenpod.models.load import load_model, read_config

#: Tokens by which vocabularies of one tokenizer may differ, for the sake of even shapes.
_PADDING = 1024


@dataclass(slots=True)
class Draft:
    """A draft model and its keys and values.

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

    def follow(self, batch: ForwardBatch) -> None:
        """Write keys and values of a step's tokens."""
        self.model.forward(self._own(batch), self.pool)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """[n, wanted] what may follow the tokens of a small step, one token for each row."""
        batch = self._own(batch)
        found = self.model.logits(self.model.forward(batch, self.pool), batch)[:, : self.wanted]
        if found.shape[1] == self.wanted:
            return found
        return pad(found, (0, self.wanted - found.shape[1]), value=-torch.inf)

    def _own(self, batch: ForwardBatch) -> ForwardBatch:
        """The step without what is the served model's alone: adapters, given embeddings."""
        t_token = batch.t_token
        if self.vocabulary < self.wanted:  # ids without a text, which only padding or chance bring
            t_token = t_token.clamp(max=self.vocabulary - 1)
        return replace(batch, t_token=t_token, given=None, t_adapter=None, adapters=None)


def load_draft(
    options: EngineOptions, served: LoadedModel, positions: int, device: torch.device
) -> LoadedModel | None:
    """The draft model that the options name, in the served model's dtype; None: they name none.

    `positions`: tokens of the longest sequence. Raises EngineError with one line for what can't
    draft for the served model.
    """
    if options.draft_folder is None:
        return None
    folder = Path(options.draft_folder)
    try:
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


def _problem(facts: ModelFacts, served: LoadedModel, positions: int) -> str | None:
    """Why a model can't draft for the served one; None: it can."""
    if facts.runs_on != "tokenpod":
        return f"{facts.architecture} is computed by {facts.runs_on}, and can't draft"
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


def draft_of(model: LoadedModel, served: LoadedModel, pool: KVPool, most: int) -> Draft:
    """What an executor drafts with."""
    return Draft(model, pool, model.config.vocab_size, served.config.vocab_size, most)


@dataclass(frozen=True, slots=True)
class BothTiles:
    """What captured steps say of rows with several tokens, for two models of unlike heads."""

    served: StepTiles
    draft: StepTiles

    def count(self, tokens: int) -> int:
        """See `StepTiles`."""
        return self.served.count(tokens) + self.draft.count(tokens)

    def fill(self, rows: RaggedRows, into: npt.NDArray[np.int32]) -> bool:
        """See `StepTiles`."""
        at = self._cut(len(into))
        return self.served.fill(rows, into[:at]) and self.draft.fill(rows, into[at:])

    def by_window(self, numbers: torch.Tensor) -> Mapping[int | None, torch.Tensor]:
        """See `StepTiles`: the served model's."""
        return self.served.by_window(numbers[: self._cut(len(numbers))])

    def of_draft(self, numbers: torch.Tensor) -> Mapping[int | None, torch.Tensor]:
        """The same of the draft model."""
        return self.draft.by_window(numbers[self._cut(len(numbers)) :])

    def _cut(self, numbers: int) -> int:
        """Both have room for as many tiles, so their parts are as one token's are."""
        served, draft = self.served.count(0), self.draft.count(0)
        return numbers * served // max(served + draft, 1)
