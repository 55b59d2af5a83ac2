"""What routers and shards say to each other, without the differences of the wire generations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

#: The batch and request id of a router's liveness probe.
LIVENESS_ID = 2**64 - 1


class FinishReason(IntEnum):
    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2


class GrammarType(IntEnum):
    NONE = 0
    JSON = 1
    REGEX = 2


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A router always sends these neutral values, never proto's zeros."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    grammar: str = ""
    grammar_type: GrammarType = GrammarType.NONE

    def constrained(self, grammar: str, kind: GrammarType) -> Sampling:
        return replace(self, grammar=grammar, grammar_type=kind)


@dataclass(frozen=True)
class Image:
    data: bytes
    mimetype: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a batch. Generations without a field leave it out."""

    id: int
    inputs: str
    truncate: int
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    add_special_tokens: bool = True
    #: v3's prompt in pieces; None sends the single text chunk that a router sends.
    chunks: tuple[str | Image, ...] | None = None
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    cache_len: int = 0
    chunk_len: int | None = None
    adapter_id: str | None = None


@dataclass(frozen=True)
class Batch:
    id: int
    requests: tuple[Request, ...]
    max_tokens: int = 0
    max_blocks: int = 0


@dataclass(frozen=True)
class CachedBatch:
    """A batch that lives in the shard, as the shard describes it."""

    id: int
    request_ids: tuple[int, ...]
    size: int
    max_tokens: int
    current_tokens: int = 0


@dataclass(frozen=True)
class TokenRun:
    """Parallel arrays: one entry a token. `is_special` may be empty for prompt tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    texts: tuple[str, ...]
    is_special: tuple[bool, ...] = ()


@dataclass(frozen=True)
class GeneratedText:
    text: str
    generated_tokens: int
    #: A plain number: a shard may send one outside the enumeration.
    finish_reason: int
    seed: int | None


@dataclass(frozen=True)
class Generation:
    request_id: int
    prefill_tokens: TokenRun | None
    tokens: TokenRun | None
    generated_text: GeneratedText | None
    #: One run a generated token.
    top_tokens: tuple[TokenRun, ...] = ()


@dataclass(frozen=True)
class StepReply:
    """What Prefill and Decode answer. v1 has no timings: they are 0 there."""

    generations: tuple[Generation, ...]
    batch: CachedBatch | None
    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    concat_ns: int | None = None

    def of(self, request_id: int) -> Generation:
        """The one generation of `request_id`."""
        (generation,) = (each for each in self.generations if each.request_id == request_id)
        return generation

    def token_ids(self) -> Iterator[tuple[int, int]]:
        """(request id, token id) of every token of the step."""
        for generation in self.generations:
            assert generation.tokens is not None
            yield from ((generation.request_id, token) for token in generation.tokens.ids)


@dataclass(frozen=True)
class ShardInfo:
    """v1 and v2 routers take a block for 16 tokens; only v3 asks the shard."""

    requires_padding: bool
    dtype: str
    device_type: str
    window_size: int | None = None
    speculate: int = 0
    support_chunking: bool = False
    use_prefix_caching: bool = False
    attention_impl: str = ""
    block_size: int = 16


@dataclass(frozen=True, order=True)
class WarmupReply:
    """Routers keep the least of all shards' replies, in this order of fields."""

    #: -1 stands for unset, which sorts below every number.
    max_supported_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int
