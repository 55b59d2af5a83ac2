"""What crosses the boundary between the service and the engine: plain structs, sent as msgpack.

Requests are in `requests`, what comes of a step in `outputs`; all else, and which of all go which
way, is here.

The service makes a `Request` of each call and receives its tokens in `StepOutputs`, one message per
step for all sequences. A *sequence* is one sample of a request; its id is never used again. Times
are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine read.
"""

from __future__ import annotations

import msgspec

from tokenpod.core.adapters import AdapterKind
from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.images import DropImages, EncodeImages, ImagesEncoded
from tokenpod.core.message import Message
from tokenpod.core.outputs import FailureCode, StepOutputs
from tokenpod.core.placement import Placement
from tokenpod.core.requests import Request
from tokenpod.core.task import Task, VectorFacts

#: KV slots that are reserved for liveness probes, whose prompts have up to ten tokens.
PROBE_TOKENS = 16
#: In the place of a draft model's folder: the layers for that of the served model's checkpoint.
MTP = "mtp"
#: Tokens of a block in `CacheEvents`, as gateways count by default.
BLOCK_TOKENS = 16


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
    kind: AdapterKind = AdapterKind.LORA
    #: Positions that it takes before a prompt.
    virtual_tokens: int = 0
    #: Whether it has an embedding or a head of its own.
    whole: bool = False


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
    #: Until the layers are made and all weights are read; and from when the layers are made until
    #: now. On a GPU weights may be read in both.
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
    #: Tokens that a step may draft for a sequence, and what finds them: "ngram", "draft_model",
    #: "eagle3", "medusa" or "mtp".
    speculate: int = 0
    draft_method: str = ""
    #: Tokens whose keys and values the host's memory holds.
    offload_slots: int = 0
    #: Prompt tokens of a step, at most; 0: not said.
    prefill_tokens: int = 0
    #: What the model is for, and of one that makes vectors, what is known of these.
    task: Task = Task.GENERATE
    vectors: VectorFacts | None = None
    #: How layers with a window keep tokens, for the operator; empty: there are none.
    windows_kept: str = ""
    #: Why prefixes of prompts are not cached, in words; empty: they are.
    no_prefix_cache: str = ""
    #: Whether rows of images are computed here.
    images: bool = False


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
    #: Prompt tokens of a step, at most.
    max_batch_prefill_tokens: int
    #: Tokens of one sequence, prompt and output; None: as many as the model can address.
    max_total_tokens: int | None = None
    #: A step with prompts keeps `max_gap_seconds` while nobody streams, too.
    short_prompt_steps: bool = False
    #: Choose fewer rows than `max_batch_size` where memory holds fewer well.
    fewer_rows: bool = False
    #: Serve short prompts before longer ones that have come a little earlier.
    shortest_first: bool = False
    #: Seconds that a step with prompts may take while others stream; None: it has no bound.
    max_gap_seconds: float | None = None
    #: KV slots; None: as many as fit into `memory_fraction` of the free memory.
    max_batch_total_tokens: int | None = None
    memory_fraction: float = 0.9
    #: "fp8_e4m3" or "int8" for keys and values of 8 bits; "auto": the model's dtype.
    kv_cache_dtype: str = "auto"
    #: A value of `core.formats.Quantize`; None: as the checkpoint has its weights.
    quantize: str | None = None
    #: A JSON object of fields that replace those of config.json.
    config_override: str | None = None
    #: Logit biases, stop tokens and allowed tokens that one request can have in all.
    max_logit_edits: int = 3072
    #: Keep keys and values of prompts for later ones that begin alike.
    prefix_caching: bool = True
    #: What is forgotten first: "lru" what was used longest ago, "lfu" what few requests have used.
    prefix_eviction: str = "lru"
    #: Refuse a model folder without a manifest of digests.
    require_manifest: bool = False
    #: Adapters that running sequences can have at once, and the largest rank of their modules.
    max_adapters: int = 0
    max_adapter_rank: int = 0
    #: Of them, those that may have an embedding or a head of their own.
    max_adapter_heads: int = 0
    #: Whether all of them may have factors of the embedding and the head.
    lora_vocabulary: bool = False
    #: Adapters that are kept in the host's memory at once.
    max_loaded_adapters: int = 128
    #: Where those lie that are loaded while serving.
    adapter_folder: str = ""
    #: Adapters to load with the model: names and folders. With `lora_fuse` it is one, and its sums
    #: are part of the model.
    adapters: list[tuple[str, str]] = []
    lora_fuse: bool = False
    #: Who may join, by name (see scheduler/policies/by_name.py).
    admission: str = "exact"
    #: What a step holds, likewise; and TGI's numbers for "alternate".
    batching: str = "mixed"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    constraints: ConstraintLimits = ConstraintLimits()
    #: Tokens that a step may draft for a sequence; 0: nothing is drafted.
    speculate: int = 0
    #: What a token yields does not depend on the steps that its request was in.
    deterministic: bool = False
    #: None: this engine is alone.
    placement: Placement | None = None
    #: Make the head's weight in the format `quantize` too.
    quantize_head: bool = False
    #: Where the model lies that finds drafts, or `MTP`; None: n-grams do.
    draft_folder: str | None = None
    #: Host memory of this pod, all ranks together, for keys and values that the pool has no room
    #: for; fewer tokens than `host_kv_least_tokens` are computed again rather than copied.
    host_kv_bytes: int = 0
    host_kv_least_tokens: int = 1
    #: What becomes of a preempted sequence, by name (see scheduler/kv/preemption.py).
    preemption: str = "auto"
    #: What is done with the model, a value of `Task`; "auto": what its files show.
    task: str = "auto"
    #: Compute rows of images, and keep so many bytes of them for further requests; None: don't.
    image_cache_bytes: int | None = None
    #: Descriptor of the socket on which questions about the process come; -1: there is none.
    questions_fd: int = -1


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
    | EncodeImages
    | DropImages
    | EngineOptions
)
FromEngine = (
    StepOutputs | CacheEvents | AdapterList | AdapterDone | ImagesEncoded | Loading | Ready | Broken
)
