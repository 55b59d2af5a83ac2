"""What crosses the boundary between the service and the engine: plain structs, sent as msgpack.

The service makes a `Request` of each call and receives its tokens in `StepOutputs`, one message per
step for all sequences. A *sequence* is one sample of a request; its id is never used again. Times
are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine read.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from tokenpod.core.constraints import Constraint, ConstraintLimits
from tokenpod.core.placement import Placement
from tokenpod.core.sampling import SamplingParams

#: KV slots that are reserved for liveness probes, whose prompts have up to ten tokens.
PROBE_TOKENS = 16


#: Tokens of a block in `CacheEvents`, as gateways count by default.
BLOCK_TOKENS = 16


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that travels: immutable, encoded as an array that begins with its type."""


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


class GivenVectors(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings that replace those of the table at some positions of a prompt."""

    #: The first of them; each has one vector.
    start: int
    #: Numbers of a vector, as many as the table has columns.
    width: int
    #: [positions, width] float32, little-endian.
    numbers: bytes


class Request(Message, frozen=True, array_like=True, tag=True):
    """One prompt and its samples. The samples share the keys and values of the prompt."""

    #: One id a sample; sample i draws from stream i of the seed.
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

    @property
    def reported(self) -> list[int]:
        """The sequences whose tokens, ends and failures are reported."""
        return self.sequence_ids if self.beam is None else self.sequence_ids[: self.beam.n]


class Abort(Message, frozen=True, array_like=True, tag=True):
    """Forget these sequences and free what they hold. Unknown ids are fine."""

    sequence_ids: list[int]
    #: They are complete: a stop sequence was found in their text. Else nobody wants them any more.
    stopped: bool = False


class Ask(Message, frozen=True, array_like=True, tag=True):
    """Answer with `StepOutputs` in this turn, with or without a step."""


class Advance(Message, frozen=True, array_like=True, tag=True):
    """A router's step: sample one token for each sequence named, then answer with `Advanced`.

    `start` are new requests (one sequence each). Each waits in the queue of all requests for a row
    and its whole bound; until then it has no part in steps and is named in the answer. A sequence
    whose prompt is not complete processes more of it, and yields a token when that ends the prompt.
    """

    op: int
    start: list[Request]
    #: Prompt tokens to process now of each of `start`, at most; 0: all.
    start_chunks: list[int]
    #: Sequences started by an earlier call. With any of them it is one step of the engine, so that
    #: they don't wait for others' prompts.
    resume: list[int]
    #: Answer once a sequence has been stepped; else at once if none can be.
    waits: bool


class WatchCache(Message, frozen=True, array_like=True, tag=True):
    """Tell of the prefix cache in `CacheEvents` from now on, all that it holds first; or stop."""

    wanted: bool


class Vocabulary(Message, frozen=True, array_like=True, tag=True):
    """The bytes of each token, for constraints; from the first front end, before any request."""

    tokens: list[bytes]
    #: Those that are no text: a grammar allows them by name alone.
    special: list[int]


class FlushCache(Message, frozen=True, array_like=True, tag=True):
    """Forget every cached prefix that no sequence uses."""


class LoadAdapter(Message, frozen=True, array_like=True, tag=True):
    """Read an adapter, and point its name to it once every rank has it; then `AdapterDone`."""

    op: int
    name: str
    #: Of its folder, below each rank's own folder of adapters.
    path: str
    #: SHA-256 of its files that is expected, in hexadecimal digits; empty: any.
    digest: str = ""


class UnloadAdapter(Message, frozen=True, array_like=True, tag=True):
    """Give no request this adapter any more; `AdapterDone` once the last that has it has ended."""

    op: int
    name: str


class FailureCode(IntEnum):
    """Why the engine gave up on a sequence or an `Advance`; each maps to one gRPC status."""

    RESOURCE_EXHAUSTED = 1
    DEADLINE_EXCEEDED = 2
    DATA_LOSS = 3
    UNAVAILABLE = 4
    INVALID_ARGUMENT = 5
    NOT_FOUND = 6


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

    `sequence_ids`, `token_ids`, `logprobs` and `finishes` are parallel: one entry a token, and
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


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks of `BLOCK_TOKENS` tokens that are in the prefix cache now, each behind the other."""

    #: The block before the first of them; None: it begins a prompt.
    parent: int | None
    #: Of each block; of it, its tokens and all blocks before it. Below 2^63 in magnitude.
    hashes: list[int]
    #: Of all blocks, `BLOCK_TOKENS` for each.
    tokens: list[int]


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that are not in the prefix cache any more."""

    hashes: list[int]


class CacheEvents(Message, frozen=True, array_like=True, tag=True):
    """What has changed in the prefix cache, in order. For the first front end."""

    #: Before the changes the cache is empty, whatever was told of it.
    cleared: bool
    changes: list[BlocksStored | BlocksRemoved]


class Loading(Message, frozen=True, array_like=True, tag=True):
    """Progress of loading: bytes of weights read so far, of how many."""

    done_bytes: int
    total_bytes: int


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that can be used."""

    #: Names this version: what `Request.adapter` says. Never used again.
    number: int
    name: str
    #: SHA-256 of its files, in hexadecimal digits.
    digest: str
    #: Largest rank of its modules.
    rank: int
    #: Bytes of host memory on rank 0.
    nbytes: int


class AdapterList(Message, frozen=True, array_like=True, tag=True):
    """The adapters that requests can have from now on; for every front end."""

    loaded: list[AdapterFacts]


class AdapterDone(Message, frozen=True, array_like=True, tag=True):
    """What became of a `LoadAdapter` or an `UnloadAdapter`. For the first front end."""

    op: int
    #: Of an adapter that was loaded.
    facts: AdapterFacts | None = None
    #: None: it is done.
    failure: FailureCode | None = None
    #: One line for the operator.
    message: str = ""


class Ready(Message, frozen=True, array_like=True, tag=True):
    """The model is warm and can generate."""

    dtype: str
    #: Of keys and values.
    kv_cache_dtype: str
    device_type: str
    attention: str
    window_size: int | None
    vocab_size: int
    #: Positions the model can address.
    max_positions: int
    #: KV slots: what `max_batch_total_tokens` can be at most.
    slots: int
    parameters: int
    weight_bytes: int
    load_seconds: float
    warmup_seconds: float
    #: What `slots` was computed from, for the operator.
    slots_from: str = ""
    #: Which of a checkpoint's factors for long texts are in use; empty if it has none.
    rope: str = ""
    #: How many of the checkpoint's tensors belong to parts that are not served; empty if none do.
    unused_tensors: str = ""
    #: Whose code computes the model: "tokenpod" or "transformers".
    runs_on: str = "tokenpod"
    #: Sequences that can run at once; 0: not said.
    rows: int = 0
    #: Whether rows are padded to the longest of their batch, for which routers then budget.
    requires_padding: bool = False
    #: Those that were loaded with the model.
    adapters: list[AdapterFacts] = []
    #: What weights of fewer bits are held in; empty: there are none.
    quantization: str = ""
    #: Tokens that a step may draft for a sequence.
    speculate: int = 0


class Broken(Message, frozen=True, array_like=True, tag=True):
    """The engine cannot go on; one line for the operator. Its process exits after it."""

    message: str
    #: Another rank is the cause: new processes may form a group again.
    peer: bool = False


class EngineOptions(Message, frozen=True, array_like=True, tag=True):
    """The first message to a new engine process."""

    model_folder: str
    #: "float32", "bfloat16", "float16"; None: the checkpoint's own.
    dtype: str | None
    device: str
    #: CPU threads; 0: one per core, less one for the front end.
    threads: int
    max_batch_size: int
    max_batch_prefill_tokens: int
    #: Tokens of one sequence, prompt and output; None: as many as the model can address.
    max_total_tokens: int | None = None
    #: KV slots; None: as many as fit into `memory_fraction` of the free memory.
    max_batch_total_tokens: int | None = None
    memory_fraction: float = 0.9
    #: "fp8_e4m3" for keys and values of 8 bits; "auto": the model's dtype.
    kv_cache_dtype: str = "auto"
    #: A value of `core.formats.Quantize`; None: as the checkpoint has its weights.
    quantize: str | None = None
    #: A JSON object of fields that replace those of config.json.
    config_override: str | None = None
    #: Logit biases, stop tokens and allowed tokens that one request can have in all.
    max_logit_edits: int = 3072
    #: Keep keys and values of prompts for later ones that begin alike.
    prefix_caching: bool = True
    #: See `scheduler.work.Limits`.
    prefix_eviction: str = "lru"
    #: Refuse a model folder without a manifest of digests.
    require_manifest: bool = False
    #: Adapters that running sequences can have at once, and the largest rank of their modules.
    max_adapters: int = 0
    max_adapter_rank: int = 0
    #: Adapters that are kept in the host's memory at once.
    max_loaded_adapters: int = 128
    #: Where those lie that are loaded while serving.
    adapter_folder: str = ""
    #: Adapters to load with the model: names and folders.
    adapters: list[tuple[str, str]] = []
    #: Who may join, by name (see scheduler/policies.py).
    admission: str = "exact"
    #: What a step holds, likewise; and TGI's numbers for "alternate".
    batching: str = "mixed"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    constraints: ConstraintLimits = ConstraintLimits()
    #: Tokens that a step may draft for a sequence; 0: nothing is drafted.
    speculate: int = 0
    #: None: this engine is alone.
    placement: Placement | None = None
    #: Make the head's weight in the format `quantize` too.
    quantize_head: bool = False


ToEngine = (
    Request
    | Abort
    | Advance
    | Ask
    | WatchCache
    | Vocabulary
    | FlushCache
    | LoadAdapter
    | UnloadAdapter
    | EngineOptions
)
FromEngine = StepOutputs | CacheEvents | AdapterList | AdapterDone | Loading | Ready | Broken
