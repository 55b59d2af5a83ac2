"""What the engine tells of a step: one `StepOutputs` for all sequences."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from tokenpod.core.message import Message


class FailureCode(IntEnum):
    """Why the engine gave up on a sequence or an `Advance`; each maps to one gRPC status."""

    RESOURCE_EXHAUSTED = 1
    DEADLINE_EXCEEDED = 2
    DATA_LOSS = 3
    UNAVAILABLE = 4
    INVALID_ARGUMENT = 5
    NOT_FOUND = 6
    #: An exception that nobody foresaw. The message is the id under which the log has the rest.
    INTERNAL = 7
    #: What compiles constraints was killed, more than once: this sequence alone fails.
    COMPILER_LOST = 8


class FinishCode(IntEnum):
    """How a sequence ended. RUNNING: it has not."""

    RUNNING = 0
    LENGTH = 1
    EOS = 2
    STOP_TOKEN = 3
    TIME_LIMIT = 4
    #: Its client has ended it by its name; the service's word, which the engine never says.
    ABORTED = 5
    #: Its constraint allows no token, or one of the constraint's limits was reached.
    CONSTRAINT = 6


class PromptDetails(msgspec.Struct, frozen=True, array_like=True):
    """What the model thought possible in the place of prompt tokens 1 to n-1; little-endian.

    They travel as bytes: so many Python numbers would hold up the front end's event loop.
    """

    #: Tokens at each position, the most likely first; of those that tie, the lowest ids.
    top_n: int
    #: [n - 1, top_n] int32, and float32 of their log probabilities.
    top_ids: bytes
    top_logprobs: bytes
    #: [n - 1] int32, from 1: the tokens' ranks, the best of those that tie; empty: not asked for.
    ranks: bytes

    def tops(self, at: int) -> tuple[list[int], list[float]]:
        """Ids and log probabilities at the position of token `at + 1`."""
        begin, end = 4 * self.top_n * at, 4 * self.top_n * (at + 1)
        ids = np.frombuffer(self.top_ids[begin:end], "<i4")
        logprobs = np.frombuffer(self.top_logprobs[begin:end], "<f4")
        return ids.tolist(), logprobs.tolist()

    def rank_list(self) -> list[int]:
        """All ranks."""
        ranks: list[int] = np.frombuffer(self.ranks, "<i4").tolist()
        return ranks


class Vectors(msgspec.Struct, frozen=True, array_like=True):
    """What was asked of a text that is read for its vectors; its end follows in this message."""

    sequence_id: int
    #: How many there are, and numbers of each.
    count: int
    width: int
    #: [count, width] float32, little-endian: so many Python numbers would hold up the front end.
    numbers: bytes
    #: They are weights of tokens, which come beside vectors.
    weights: bool = False


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's prompt is complete; comes with its first token."""

    sequence_id: int
    #: Prompt tokens found in the prefix cache.
    cached_tokens: int
    #: When its first chunk was launched.
    began_at: int
    #: Log probabilities of prompt tokens 1 to n-1, where asked for.
    prompt_logprobs: list[float] | None = None
    #: What more was asked of them.
    prompt_details: PromptDetails | None = None


class Top(msgspec.Struct, frozen=True, array_like=True):
    """The most likely tokens at one position, most likely first. Ties at the end are all there.

    `rank`: of the token that was drawn, from 1; 0: it was not asked for.
    """

    #: Index into the parallel arrays of `StepOutputs`.
    at: int
    token_ids: list[int]
    logprobs: list[float]
    rank: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The engine gave up on this sequence."""

    sequence_id: int
    code: FailureCode
    message: str


class Advanced(msgspec.Struct, frozen=True, array_like=True):
    """An `Advance` is complete; its tokens came in this and earlier messages."""

    op: int
    #: Nanoseconds in the model, in choosing tokens, and in all.
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    failure: Failure | None = None
    #: Prompt tokens that its sequences have yet to be given, by sequence id.
    behind: dict[int, int] = {}
    #: Sequences that were not given what was asked for: no row, or not enough of the budget.
    waiting: list[int] = []


class MaskCounts(msgspec.Struct, frozen=True, array_like=True):
    """What constraints have cost since the start."""

    #: Masks that steps needed, and those of them that came too late for their step.
    needed: int = 0
    late: int = 0
    #: Nanoseconds of the workers, in all.
    nanoseconds: int = 0
    #: Compiled constraints: found in the cache, made, and refused.
    cached: int = 0
    compiled: int = 0
    refused: int = 0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Requests that have ended, counted by vLLM's states."""

    #: By end of text, a stop token or a stop sequence.
    stopped: int = 0
    #: At their most new tokens, or their time limit.
    length: int = 0
    #: Given up by the client, late, or failed.
    aborted: int = 0
    #: Refused, because they could never fit.
    ignored: int = 0


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """Steps since the start of the engine, added up."""

    steps: int = 0
    #: Nanoseconds with at least one step under way; the rest of the time the engine was idle.
    busy_ns: int = 0
    #: Sequences of all steps, and tokens that were computed in them.
    rows: int = 0
    tokens: int = 0
    #: Tokens that were generated.
    generated: int = 0
    #: Kernels that were compiled since the engine was ready, while a step waited.
    compiled: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What the engine holds after a step, or after an abort that no step follows."""

    running: int
    waiting: int
    #: Tokens that waiting requests need computed.
    waiting_tokens: int
    #: KV slots: in all, free, and in the prefix tree without a user (evictable).
    slots: int
    free_slots: int
    evictable_slots: int
    #: Times since the start that a running sequence's memory was taken.
    preemptions: int = 0
    #: Prompt tokens since the start of all requests that have a token, and those of them that were
    #: in the prefix tree.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Tokens that the prefix tree has forgotten since the start, to make room.
    evicted_tokens: int = 0
    #: Different adapters of running sequences.
    adapters: int = 0
    #: Preempted sequences whose keys and values wait in host memory, and tokens since the start
    #: that went there.
    swapped: int = 0
    swapped_tokens: int = 0
    #: Requests that have ended since the start, by how: of several samples, the last one.
    ended: Ended = Ended()
    masks: MaskCounts = MaskCounts()
    #: Tokens drafted since the start, and those of them that were accepted, by how far behind the
    #: last known token they stood; up to the most that any step had.
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    #: Tokens since the start whose keys and values came back from the host's memory, after a
    #: preemption or as a cached prefix.
    fetched_tokens: int = 0
    #: Tokens that the host's memory has room for, and those of them that are taken.
    offload_slots: int = 0
    offload_used_slots: int = 0
    steps: StepCounts = StepCounts()

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted since the start."""
        return sum(self.drafted_at)

    @property
    def accepted_tokens(self) -> int:
        """Those of them that were accepted."""
        return sum(self.accepted_at)


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence had drafts in this step."""

    sequence_id: int
    drafted: int
    #: Drafts that were drawn and kept: the first ones.
    accepted: int


class StepOutputs(Message, frozen=True, array_like=True, tag=True):
    """Everything one step brought.

    `sequence_ids`, `token_ids`, `logprobs` and `finishes` are parallel: one entry per token, and
    several in order of a sequence with drafts. A sequence that ends without a token (its time limit
    passed in the queue) has token id -1.
    """

    #: Number of the last step that has settled; the same as before if this message brings none.
    step: int
    #: When it was sent.
    at: int
    sequence_ids: list[int]
    token_ids: list[int]
    #: 0.0 where not asked for.
    logprobs: list[float]
    finishes: list[int]
    load: Load
    started: list[Started] = []
    tops: list[Top] = []
    failures: list[Failure] = []
    advanced: list[Advanced] = []
    drafted: list[Drafted] = []
    #: Of constrained sequences that end: whether the text is whole by the constraint, by id.
    satisfied: dict[int, bool] = {}
    vectors: list[Vectors] = []
