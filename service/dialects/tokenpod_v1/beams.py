"""Beam searches of `tokenpod.v1` to plain values."""

from __future__ import annotations

from typing import Any

from tokenpod.core.requests import BeamParams, EarlyStop
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

_EARLY_STOP = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStop.FALSE,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStop.FALSE,
    pb.EARLY_STOPPING_ALWAYS: EarlyStop.TRUE,
    pb.EARLY_STOPPING_NEVER: EarlyStop.NEVER,
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


def beam_of(request: pb.GenerateRequest) -> BeamParams | None:
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


def _check_beside(request: pb.GenerateRequest) -> None:
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


def _greedy(sampling: pb.SamplingOptions, name: str) -> bool:
    """Whether a field says that nothing is drawn."""
    return name == "temperature" and sampling.temperature == 0
