"""Requests of `tokenpod.v1` to plain values, searches by beams among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.duration_pb2 import Duration

from tokenpod.core.requests import BeamParams, EarlyStop
from tokenpod.service.calls.call import (
    AskedConstraint,
    ConstraintKind,
    GenerateCall,
    Output,
    Prompt,
    Sampling,
    Stopping,
    TokensCall,
)
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.dialects.fields import copied, given, unless_unset
from tokenpod.service.dialects.tokenpod_v1.chats import chat_prompt
from tokenpod.service.text.tokenizers.generation_defaults import with_defaults
from tokenpod_client.protos.tokenpod.v1 import generation_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb

MOST_LABELS = 16
MOST_KEY_BYTES, MOST_VALUE_BYTES = 63, 256
MOST_SALT_BYTES = 64
MOST_FACTOR = 100
#: Of google.protobuf.Duration.
_NANOSECONDS = 1_000_000_000
_MOST_SECONDS = 315_576_000_000
#: A limit beyond is none: a moment must fit into 64 bits of nanoseconds.
_FOREVER = 10**18
#: Fields whose 0 would leave nothing to choose from, or is no number of samples.
_ABOVE_ZERO = ("top_p", "typical_p", "repetition_penalty", "n", "best_of")
_EARLY_STOP = {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStop.FALSE,
    generation_pb2.EARLY_STOPPING_HEURISTIC: EarlyStop.FALSE,
    generation_pb2.EARLY_STOPPING_ALWAYS: EarlyStop.TRUE,
    generation_pb2.EARLY_STOPPING_NEVER: EarlyStop.NEVER,
}
#: Fields that draw, by what would contradict a search.
_RANDOM = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n", "best_of")
#: Fields that may stand beside a search, where they do not draw.
_BESIDE = ("beam", "do_sample", "temperature")
#: Fields that a search could have, and has not yet; so are all others of `sampling`.
_NOT_BUILT = {
    "stopping": ("stop_sequences", "eos_boost"),
    "output": ("top_n_tokens", "return_ranks"),
}
_LABEL = re.compile(r"[\x20-\x7e]*")


async def generate_call(
    request: generation_pb2.GenerateRequest,
    caller: str,
    *,
    stream: bool,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> GenerateCall:
    """What `request` asks for. Other tasks get their turn while long lists are copied.

    Args:
        caller: who asks.
        stream: tokens are sent as they come.
        defaults: fields of its sampling that it leaves open.

    Raises:
        Unimplemented: for what it does not do yet.
        InvalidArgument: for values that this protocol alone can have.
    """
    if (beam := beam_of(request)) is not None:
        stream, sampling = False, Sampling(do_sample=False, n=beam.n)
    else:
        stream = stream and unless_unset(request.output, "stream")
        asked = given(request.sampling, Sampling)
        sampling = Sampling(**with_defaults(asked, defaults) if defaults else asked)
    _check(request, stream=stream)
    images: list[GivenImage] = []
    return GenerateCall(
        prompt=await _prompt(request, images),
        images=images,
        sampling=sampling,
        beam=beam,
        stopping=Stopping(
            **given(request.stopping, Stopping),
            **_eos_boost(request.stopping),
            time_limit_ns=_time_limit(request.stopping),
        ),
        output=_output(request.output, stream=stream),
        truncate=request.truncate,
        request_id=request.request_id,
        priority=request.priority,
        max_draft_tokens=(
            request.max_draft_tokens if request.HasField("max_draft_tokens") else None
        ),
        failures_last=True,
        labels=_labels(request.labels),
        # Two callers that choose the same salt share nothing.
        salt=f"{caller} {request.cache_salt}" if request.cache_salt else "",
        adapter=request.adapter,
        constraint=_constraint(request),
    )


async def tokens_call(request: pb.TokenizeRequest) -> TokensCall:
    """What `request` asks for. Raises as `generate_call` does."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "one of text and chat must be set")
    is_chat = kind == "chat"
    if is_chat and request.return_offsets:
        raise InvalidArgument("return_offsets", "is for a text: a chat's own text is not returned")
    if is_chat and request.HasField("add_special_tokens"):
        problem = "is for a text: a chat has the special tokens that its template writes"
        raise InvalidArgument("add_special_tokens", problem)
    images: list[GivenImage] = []
    prompt = await chat_prompt(request.chat, images) if is_chat else request.text
    return TokensCall(
        prompt,
        add_special_tokens=unless_unset(request, "add_special_tokens"),
        return_ids=request.return_token_ids,
        return_offsets=request.return_offsets,
        images=images,
    )


def skips_special(request: Any) -> bool:
    """Whether special tokens are left out of a text."""
    return unless_unset(request, "skip_special_tokens")


# -- parts -------------------------------------------------------------------------------------


def _output(options: generation_pb2.OutputOptions, *, stream: bool) -> Output:
    prompt = options.return_prompt_logprobs or options.prompt_top_n_tokens
    return Output(
        **given(options, Output) | {"stream": stream},
        logprobs=options.return_logprobs,
        ranks=options.return_ranks,
        prompt_logprobs=options.return_prompt_logprobs,
        prompt_ranks=options.return_ranks and bool(prompt),
        text_offsets=options.return_text_offsets,
        final_text=unless_unset(options, "return_final_text"),
    )


def _check(request: generation_pb2.GenerateRequest, *, stream: bool) -> None:
    """What other protocols can't say, or say otherwise: a 0 that is set, and this one's fields."""
    sampling: Any = request.sampling
    for name in _ABOVE_ZERO:
        if sampling.HasField(name) and not getattr(sampling, name):
            raise InvalidArgument(f"sampling.{name}", "is 0; must be above 0")
    if request.HasField("truncate") and not request.truncate:
        raise InvalidArgument("truncate", "is 0; at least 1 token must be kept")
    n = sampling.n if sampling.HasField("n") else 1
    if stream and sampling.best_of > n:
        problem = (
            f"is {sampling.best_of}; more than sampling.n, {n}, is for GenerateOnce, or for "
            "output.stream false"
        )
        raise InvalidArgument("sampling.best_of", problem)
    if (size := len(request.cache_salt.encode())) > MOST_SALT_BYTES:
        problem = f"has {size} bytes; at most {MOST_SALT_BYTES} are allowed"
        raise InvalidArgument("cache_salt", problem)


def _time_limit(stopping: generation_pb2.StoppingOptions) -> int:
    """In nanoseconds; 0: none."""
    if not stopping.HasField("time_limit"):
        return 0
    limit: Duration = stopping.time_limit
    seconds, nanos = limit.seconds, limit.nanos
    if abs(nanos) >= _NANOSECONDS or seconds > _MOST_SECONDS or (seconds > 0 > nanos):
        problem = f"is {seconds} s and {nanos} ns; that is no duration"
        raise InvalidArgument("stopping.time_limit", problem)
    if seconds * _NANOSECONDS + nanos <= 0:
        raise InvalidArgument("stopping.time_limit", "must be above 0")
    return min(seconds * _NANOSECONDS + nanos, _FOREVER)


def _eos_boost(stopping: generation_pb2.StoppingOptions) -> dict[str, Any]:
    if not stopping.HasField("eos_boost"):
        return {}
    boost = stopping.eos_boost
    if not 1 < boost.factor <= MOST_FACTOR:
        problem = f"is {boost.factor:g}; must be above 1, up to {MOST_FACTOR}"
        raise InvalidArgument("stopping.eos_boost.factor", problem)
    if stopping.ignore_eos:
        raise InvalidArgument("stopping.eos_boost", "is of no use: stopping.ignore_eos is true")
    return {"eos_boost_after": boost.start_token_count, "eos_boost_factor": boost.factor}


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > MOST_LABELS:
        problem = f"has {len(labels)} entries; at most {MOST_LABELS} are allowed"
        raise InvalidArgument("labels", problem)
    for key, value in labels.items():
        if not (1 <= len(key) <= MOST_KEY_BYTES and _LABEL.fullmatch(key)):
            problem = f"has a key that is not 1 to {MOST_KEY_BYTES} characters of printable ASCII"
            raise InvalidArgument("labels", problem)
        if not (len(value) <= MOST_VALUE_BYTES and _LABEL.fullmatch(value)):
            problem = f"is not at most {MOST_VALUE_BYTES} characters of printable ASCII"
            raise InvalidArgument(f"labels[{key}]", problem)
    return dict(labels)


def _constraint(request: generation_pb2.GenerateRequest) -> AskedConstraint | None:
    if not request.HasField("constraint"):
        return None
    asked = request.constraint
    kind = asked.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("constraint", "has no kind")
    field = f"constraint.{kind}"
    if kind == "choice":
        texts = tuple(asked.choice.texts)
        return AskedConstraint(ConstraintKind.CHOICE, f"{field}.texts", texts=texts)
    text = "" if kind == "json_object" else getattr(asked, kind)
    return AskedConstraint(ConstraintKind[kind.upper()], field, text)


async def _prompt(request: generation_pb2.GenerateRequest, images: list[GivenImage]) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return await copied(request.token_ids.ids)
        case "chat":
            return await chat_prompt(request.chat, images)
        case _:
            return None


# -- beams -------------------------------------------------------------------------------------


def beam_of(request: generation_pb2.GenerateRequest) -> BeamParams | None:
    """The search that is asked for; None: none is.

    Raises:
        InvalidArgument: for what contradicts a search.
        Unimplemented: for what can't go with one yet.
    """
    if not request.sampling.HasField("beam"):
        return None
    _check_beside(request)
    beam = request.sampling.beam
    if (end := beam.early_stopping) not in _EARLY_STOP:
        problem = f"is {end}; must be a value of EarlyStopping, 0 to {max(_EARLY_STOP)}"
        raise InvalidArgument("sampling.beam.early_stopping", problem)
    return BeamParams(
        width=beam.width,
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOP[end],
        n=beam.n if beam.HasField("n") else 1,
    )


def _check_beside(request: generation_pb2.GenerateRequest) -> None:
    """What a request with a search must not have."""
    sampling = request.sampling
    set_fields = {field.name for field, _ in sampling.ListFields()}
    random = [name for name in _RANDOM if name in set_fields and not _greedy(sampling, name)]
    if sampling.do_sample:
        random.append("do_sample")
    if sampling.watermark:
        random.append("watermark")
    if random:
        problem = "can't be set beside sampling.beam: a search draws nothing"
        if random[0] in ("n", "best_of"):
            problem = "can't be set beside sampling.beam: its own n says how many texts to return"
        raise InvalidArgument(f"sampling.{random[0]}", problem)
    if request.output.stream:
        problem = "can't be true beside sampling.beam: a search has no tokens before its end"
        raise InvalidArgument("output.stream", problem)
    later = [f"sampling.{name}" for name in sorted(set_fields - {*_BESIDE})]
    for part, names in _NOT_BUILT.items():
        message: Any = getattr(request, part)
        later += [f"{part}.{f.name}" for f, _ in message.ListFields() if f.name in names]
    if (constraint := request.constraint.WhichOneof("kind")) is not None:
        later.append(f"constraint.{constraint}")
    if later:
        raise Unimplemented(later[0], "is not supported beside sampling.beam")


def _greedy(sampling: generation_pb2.SamplingOptions, name: str) -> bool:
    """Whether a field says that nothing is drawn."""
    return name == "temperature" and sampling.temperature == 0
