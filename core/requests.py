"""What the service asks of the engine: requests, and how their texts end.

A *sequence* is one sample of a request; its id is never used again. Times are nanoseconds of
CLOCK_MONOTONIC, which all processes of a machine read.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from tokenpod.core.constraints import Constraint
from tokenpod.core.message import Message
from tokenpod.core.sampling import SamplingParams


class StoppingParams(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence ends, as far as tokens show. The service looks for stop sequences."""

    max_new_tokens: int
    min_new_tokens: int = 0
    #: End-of-text tokens; empty when they are to be ignored. Not sampled before `min_new_tokens`.
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    #: TGI's order: the last allowed token finishes with LENGTH even if it is an end-of-text token.
    length_first: bool = False
    #: Finish with TIME_LIMIT once this moment has passed.
    time_limit_at: int | None = None


class EarlyStop(IntEnum):
    """When a beam search ends; transformers' `early_stopping`."""

    #: False: once the best beam, were it to end now, is no better than the worst result.
    FALSE = 0
    #: True: as soon as there are `width` results.
    TRUE = 1
    #: "never": once no beam could become better than the worst result.
    NEVER = 2


class BeamParams(msgspec.Struct, frozen=True, array_like=True):
    """A beam search: keep the likeliest beginnings, and extend them all."""

    #: Beginnings that are kept.
    width: int
    #: A result's log probability is divided by its length to the power of this.
    length_penalty: float = 1.0
    early_stopping: EarlyStop = EarlyStop.FALSE
    #: Results that are returned, the best first; at most `width`.
    n: int = 1


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """What is asked of a text that is read and not continued: the model's vector of it."""

    #: A vector for each token instead, as it is before they are pooled.
    tokens: bool = False
    #: A weight of each token, too.
    weights: bool = False
    #: So many tokens at the beginning are read, and left out of a mean: those of an instruction.
    left_out: int = 0


class GivenVectors(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that replace those of the table at some places of a prompt.

    They may bring positions of their own, of three axes: see `core.positions`.
    """

    #: The first place; each has one vector.
    start: int
    #: [n, width] as many numbers as the table has columns: numpy's float32, or a tensor of the
    #: engine. They never leave its process but within a plan.
    rows: Any
    #: [3, n] int32, little-endian: time, height and width of each vector, from the position that a
    #: token at `start` would have; empty: each vector is one further on, as tokens are.
    axes: bytes = b""
    #: With `axes`: by how much the token behind the vectors is further on than one at `start`.
    span: int = 0
    #: Equal keys, equal vectors and equal positions of them; empty: what they are tells.
    key: bytes = b""
    #: Each sees all of them, not only those before it: they are computed in one step.
    mutual: bool = False

    @property
    def count(self) -> int:
        """Vectors."""
        return len(self.rows)


class ImageRun(msgspec.Struct, frozen=True, array_like=True):
    """Adjacent positions of a prompt that stand for adjacent rows of an image."""

    #: Which of the request's images.
    image: int
    #: The first row, the first position, and how many there are.
    first: int
    start: int
    count: int


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt has its images."""

    #: Of the `EncodeImages` that had their rows computed.
    op: int
    runs: list[ImageRun]


class Request(Message, frozen=True, array_like=True, tag=True):
    """One prompt and its samples. The samples share the keys and values of the prompt."""

    #: One id per sample; sample i draws from stream i of the seed.
    sequence_ids: list[int]
    prompt: list[int]
    sampling: SamplingParams
    stopping: StoppingParams
    #: Report the log probability of each token.
    logprobs: bool = False
    #: Report so many most likely tokens at each position.
    top_n_tokens: int = 0
    #: Report each token's rank among all, by the model's own distribution.
    ranks: bool = False
    #: Report the log probability of each prompt token; such a prompt skips the prefix cache.
    prompt_logprobs: bool = False
    #: Higher first.
    priority: int = 0
    arrived_at: int = 0
    #: Drop the request once this moment has passed.
    deadline_at: int | None = None
    #: Drop the request if no step has held any of it by this moment: its end would be late.
    begin_by: int | None = None
    #: Requests share cached prefixes only within one salt (adapter, tenant).
    salt: str = ""
    #: A router's liveness probe: one new token at once, in a row and slots that are reserved for
    #: it. Its prompt has less than PROBE_TOKENS tokens.
    probe: bool = False
    #: The number of its adapter, from 1; 0: none. Those of one adapter share a salt.
    adapter: int = 0
    #: Positions whose embeddings are given; penalties alone count their tokens.
    given: list[GivenVectors] = []
    #: Tokens that may be drafted in a step, at most, where the engine drafts any.
    drafts: int = 0
    #: With `prompt_logprobs`: so many most likely tokens at each position of the prompt, and the
    #: ranks of its tokens.
    prompt_top_n_tokens: int = 0
    prompt_ranks: bool = False
    #: What the text must conform to.
    constraint: Constraint | None = None
    #: Search: one sequence for each beam, of which the first `n` tell the results, at the end.
    #: `top_n_tokens` is what a search needs of each beam, at least `width` and one for each token
    #: that ends the text.
    beam: BeamParams | None = None
    #: Positions before the prompt that belong to its adapter.
    virtual_tokens: int = 0
    #: The adapter has their keys and values; else it has their embeddings.
    virtual_kv: bool = False
    #: The prompt is read for its vectors: nothing is sampled, and nothing of it is kept in the
    #: prefix cache. `max_new_tokens` is 1, in the place of the end.
    pooling: PoolingParams | None = None
    #: Each token of the prompt sees all of it: it is computed in one step, and known again as a
    #: whole. The scheduler says it, of models that read prompts so.
    mutual: bool = False
    #: Images in the prompt, of which the engine makes `given`.
    images: ImageRows | None = None

    @property
    def positions(self) -> int:
        """Of the prompt, and of the virtual tokens before it."""
        return self.virtual_tokens + len(self.prompt)

    @property
    def length(self) -> int:
        """Positions that its longest sequence takes at most."""
        return self.positions + (0 if self.pooling else self.stopping.max_new_tokens)

    @property
    def timed(self) -> bool:
        """Whether there is a moment at which it has to end, or to have begun."""
        moments = self.deadline_at, self.begin_by, self.stopping.time_limit_at
        return moments != (None, None, None)

    @property
    def reported(self) -> list[int]:
        """The sequences whose tokens, ends and failures are reported."""
        return self.sequence_ids if self.beam is None else self.sequence_ids[: self.beam.n]
