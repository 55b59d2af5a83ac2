"""What clients ask for, as plain values, and what the engine's sampler gets of it.

The codecs of the dialects make these values from messages; limits.py checks them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from msgspec import structs

from tokenpod.core.requests import BeamParams
from tokenpod.core.sampling import CUTS, TABLE, SamplingParams
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage, GivenTensors

#: A deadline beyond is none: it would not fit into 64 bits of nanoseconds.
_FOREVER_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: raw values, 0 or None where not set."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    typical_p: float = 0.0
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: Empty: all.
    allowed_token_ids: Sequence[int] = ()
    #: Texts; what they are as tokens, `bad_words.token_runs` says.
    bad_words: Sequence[str] = ()
    seed: int | None = None
    watermark: bool = False
    n: int = 0
    best_of: int = 0


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sample ends. Times in nanoseconds; 0 or None where not set."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_sequences: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_sequence: bool = False
    time_limit_ns: int = 0
    #: From which token on ends become likelier, and by what for each; a factor of 1: never.
    eos_boost_after: int = 0
    eos_boost_factor: float = 1.0
    #: Of `max_new_tokens` what does not fit is left out, and not refused.
    shorten: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What a client wants to read."""

    #: Events as they come; else all of them at the end.
    stream: bool = True
    logprobs: bool = False
    top_n_tokens: int = 0
    #: Each token's rank among all.
    ranks: bool = False
    prompt_logprobs: bool = False
    #: At each position of the prompt; and the ranks of its tokens.
    prompt_top_n_tokens: int = 0
    prompt_ranks: bool = False
    #: Where each token's text begins.
    text_offsets: bool = False
    #: The text of the tokens; without it they are read for stop sequences alone.
    text: bool = True
    #: The whole text at the end, besides the pieces of it.
    final_text: bool = True
    #: Of a chat: tell neither reasoning nor calls of tools from text. Most protocols can't.
    raw_text: bool = True
    skip_special_tokens: bool = True
    #: None: as the tokenizer does.
    spaces_between_special_tokens: bool | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the model is to say what it thought of the prompt."""
        return self.prompt_logprobs or self.prompt_top_n_tokens > 0 or self.prompt_ranks


#: What Python takes for a token id in a list.
ID_BYTES = 36

#: Text, token ids or a chat; None: the client set none.
Prompt = str | Sequence[int] | ChatPrompt | None


def prompt_bytes(prompt: Prompt) -> int:
    """About how many bytes of memory a prompt takes."""
    if prompt is None:
        return 0
    if isinstance(prompt, str):
        # Python's strings: as many bytes for each character as the widest one needs.
        return len(prompt) if prompt.isascii() else 4 * len(prompt)
    if isinstance(prompt, ChatPrompt):
        return prompt.memory
    return ID_BYTES * len(prompt)


class ConstraintKind(Enum):
    """How a constraint is described."""

    JSON_SCHEMA = auto()
    JSON_OBJECT = auto()
    REGEX = auto()
    GRAMMAR = auto()
    CHOICE = auto()
    STRUCTURAL_TAG = auto()
    #: Of a kind that is not known; refused.
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class AskedConstraint:
    """What a text must conform to, as a client says it."""

    kind: ConstraintKind
    #: Where the client put it, for errors.
    field: str
    text: str = ""
    #: Of a choice.
    texts: Sequence[str] = ()

    @property
    def size(self) -> int:
        """Bytes of all that it says."""
        return sum(len(text.encode()) for text in (self.text, *self.texts))


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request to generate text."""

    prompt: Prompt
    sampling: Sampling
    stopping: Stopping
    output: Output
    #: Search; `sampling` then says no more than how many results there are.
    beam: BeamParams | None = None
    truncate: int = 0
    request_id: str = ""
    priority: int = 0
    #: A sample that fails ends the call after the other samples, not at once.
    failures_last: bool = False
    #: For the log.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Prompts share cached prefixes within one salt alone.
    salt: str = ""
    #: The name of one; empty: none.
    adapter: str = ""
    constraint: AskedConstraint | None = None
    #: Tokens that a step may draft; None: as many as the server drafts.
    max_draft_tokens: int | None = None
    #: Of a chat, in the order of their places there.
    images: Sequence[GivenImage] = ()
    #: Images of a prompt of tokens, which has theirs.
    tensors: GivenTensors | None = None

    @property
    def sequences(self) -> int:
        """Sequences that run for it."""
        if self.beam is not None:
            return self.beam.width
        return self.sampling.best_of or self.sampling.n or 1


@dataclass(frozen=True, slots=True)
class TokensCall:
    """A request to count tokens, or to list them."""

    prompt: str | ChatPrompt
    add_special_tokens: bool = True
    return_ids: bool = False
    #: Of a text: where each token begins and ends.
    return_offsets: bool = False
    #: Of a chat, in the order of their places there.
    images: Sequence[GivenImage] = ()


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A router's `Request`, of any wire generation; fields that one lacks have their defaults."""

    id: int
    inputs: str
    truncate: int
    add_special_tokens: bool
    prefill_logprobs: bool
    top_n_tokens: int
    max_new_tokens: int
    stop_sequences: Sequence[str]
    ignore_eos: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    seed: int
    watermark: bool
    constraint: AskedConstraint | None
    adapter_id: str | None
    #: Prompt tokens to process in this call; None: all.
    chunk_len: int | None
    #: Whether a step may bring it several tokens.
    several_tokens: bool = True
    #: And where they stand in `inputs`: offsets, rising.
    images: Sequence[GivenImage] = ()
    image_places: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """A router's `Batch`."""

    id: int
    requests: Sequence[ShardRequest]


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """What an answer says of a batch that its router can go on with."""

    id: int
    request_ids: Sequence[int]
    max_tokens: int
    current_tokens: int


@dataclass(slots=True)
class TokenList:
    """Parallel: tokens with their texts."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    special: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShardText:
    """How a router's request ended. `finish_reason` is TGI's number."""

    text: str
    generated_tokens: int
    finish_reason: int
    seed: int | None
    prompt_tokens: int


@dataclass(slots=True)
class ShardGeneration:
    """One request's part of a router's step: one token, or several where some were drafted.

    It grows while the step's tokens come.
    """

    request_id: int
    tokens: TokenList = field(default_factory=TokenList)
    prefill: TokenList | None = None
    #: One for each token, where asked for.
    tops: list[TokenList] = field(default_factory=list)
    text: ShardText | None = None


@dataclass(frozen=True, slots=True)
class ShardStep:
    """The answer to Prefill and Decode. Times in nanoseconds."""

    generations: list[ShardGeneration]
    batch: CachedBatch | None
    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int | None = None


def deadline_of(remaining: float | None) -> int | None:
    """When a call's deadline passes, in CLOCK_MONOTONIC nanoseconds; None: it has none.

    `remaining`: seconds from now on; None, or more than fits into 64 bits of nanoseconds: none.
    """
    if remaining is None or remaining >= _FOREVER_SECONDS:
        return None
    return time.monotonic_ns() + int(remaining * 1e9)


# -- for the engine's sampler -----------------------------------------------------------------

#: Divisors of logits stay where float32 can hold the quotient: beyond, nothing changes but NaN.
_LEAST_DIVISOR, _MOST_DIVISOR = 1e-6, 1e6

_NO_STOPPING = Stopping()


def check_allowed(
    call: GenerateCall, eos: frozenset[int], bad_words: Sequence[Sequence[int]] = ()
) -> None:
    """Raise InvalidArgument if what may be drawn leaves nothing to draw.

    Args:
        eos: tokens that end a text.
        bad_words: the call's as tokens.
    """
    allowed, ends = {*call.sampling.allowed_token_ids}, eos | {*call.stopping.stop_token_ids}
    if call.stopping.min_new_tokens and allowed and allowed <= ends:
        problem = "leaves only tokens that end the text, none before stopping.min_new_tokens"
        raise InvalidArgument("sampling.allowed_token_ids", problem)
    if allowed and allowed <= {word[0] for word in bad_words if len(word) == 1}:
        problem = "leaves only tokens that are words of sampling.bad_words"
        raise InvalidArgument("sampling.allowed_token_ids", problem)


def sampling_params(
    sampling: Sampling,
    seed: int,
    stopping: Stopping = _NO_STOPPING,
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """Checked values with every "not set" made neutral.

    Of `stopping`, how ends are drawn; `bad_words` are the call's as tokens.
    """
    asked: dict[str, Any] = {
        "eos_boost_after": stopping.eos_boost_after,
        "eos_boost_factor": stopping.eos_boost_factor,
    }
    for column in TABLE.columns:
        value = getattr(sampling, column.name, None)
        if value:
            asked[column.name] = _divisor(value) if column.knob.divides else value
    params = SamplingParams(**asked | {"seed": seed, "bad_words": [*bad_words]})
    if sampling.do_sample is not None:
        return params
    several = max(sampling.n, sampling.best_of) > 1
    tuned = bool(sampling.temperature) or several or TABLE.needs(params) & CUTS != 0
    return structs.replace(params, do_sample=sampling.temperature != 0.0 and tuned)


def shard_sampling_params(request: ShardRequest) -> SamplingParams:
    """TGI's rules: sampling if asked for, or if any knob is off its neutral value."""
    temperature, top_p = _divisor(request.temperature), request.top_p or 1.0
    typical_p = request.typical_p or 1.0
    tuned = (temperature != 1.0, request.top_k, top_p < 1.0, typical_p < 1.0)
    return SamplingParams(
        do_sample=request.do_sample or any(tuned),
        temperature=temperature,
        top_k=request.top_k,
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=_divisor(request.repetition_penalty),
        relative_frequency_penalty=request.frequency_penalty,
        watermark=request.watermark,
        seed=request.seed,
        top_of_processed=True,
    )


def _divisor(value: float | None) -> float:
    """A divisor of logits; None and 0 are neutral."""
    return min(max(value, _LEAST_DIVISOR), _MOST_DIVISOR) if value else 1.0
