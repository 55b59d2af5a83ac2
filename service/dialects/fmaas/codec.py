"""Requests of `fmaas` to plain values, and what TGIS would refuse of them."""

from __future__ import annotations

import secrets

from tokenpod.service.calls.call import (
    AskedConstraint,
    ConstraintKind,
    GenerateCall,
    Output,
    Sampling,
    Stopping,
)
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import PromptTooLong, RequestLimits
from tokenpod.service.serving.adapters import Adapters
from tokenpod_client.protos.fmaas import generation_pb2 as pb

_NANOSECONDS_OF_MS = 1_000_000

#: Where fields of `GenerateCall` lie in a request.
FIELDS = {
    "stopping": "params.stopping",
    "output": "params.response",
    "sampling": "params.sampling",
    "sampling.repetition_penalty": "params.decoding.repetition_penalty",
    "truncate": "params.truncate_input_tokens",
}


def generate_call(text: str, params: pb.Parameters, *, stream: bool) -> GenerateCall:
    """What is asked for one prompt; expects checked parameters."""
    stopping, response = params.stopping, params.response
    decay = params.decoding.length_penalty
    return GenerateCall(
        prompt=text,
        sampling=_sampling(params),
        stopping=Stopping(
            max_new_tokens=stopping.max_new_tokens or DEFAULT_NEW_TOKENS,
            min_new_tokens=stopping.min_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            include_stop_sequence=(
                stopping.include_stop_sequence
                if stopping.HasField("include_stop_sequence")
                else True
            ),
            time_limit_ns=stopping.time_limit_millis * _NANOSECONDS_OF_MS,
            shorten=True,
            eos_boost_after=decay.start_index,
            eos_boost_factor=decay.decay_factor or 1.0,
        ),
        output=Output(
            stream=stream,
            logprobs=response.token_logprobs and response.generated_tokens,
            top_n_tokens=response.top_n_tokens if response.generated_tokens else 0,
            ranks=response.token_ranks and response.generated_tokens,
            prompt_logprobs=response.token_logprobs and response.input_tokens,
            prompt_top_n_tokens=response.top_n_tokens if response.input_tokens else 0,
            prompt_ranks=response.token_ranks and response.input_tokens,
            text_offsets=stream,
            final_text=not stream,
        ),
        truncate=params.truncate_input_tokens,
        constraint=_constraint(params.decoding),
    )


def _constraint(decoding: pb.DecodingParameters) -> AskedConstraint | None:
    guided = decoding.WhichOneof("guided")
    field = f"params.decoding.{guided}"
    match guided:
        case None:
            return None
        case "format":
            is_json = decoding.format == pb.DecodingParameters.JSON
            return AskedConstraint(ConstraintKind.JSON_OBJECT, field) if is_json else None
        case "choice":
            texts = tuple(decoding.choice.choices)
            return AskedConstraint(ConstraintKind.CHOICE, f"{field}.choices", texts=texts)
        case _:
            return AskedConstraint(ConstraintKind[guided.upper()], field, getattr(decoding, guided))


def _sampling(params: pb.Parameters) -> Sampling:
    sampling, penalty = params.sampling, params.decoding.repetition_penalty
    chosen = sampling.HasField("temperature")
    if params.method != pb.SAMPLE or (chosen and not sampling.temperature):
        return Sampling(do_sample=False, repetition_penalty=penalty)
    return Sampling(
        do_sample=True,
        temperature=sampling.temperature if chosen else None,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        repetition_penalty=penalty,
        # Its clients expect a number of 32 bits.
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(32),
    )


# -- what TGIS refuses -------------------------------------------------------------------------

#: What TGIS and its adapter let a request have, whatever this server's own flags say.
MOST_STOPS, MOST_STOP_BYTES, MOST_TOP_TOKENS = 6, 240, 10
DEFAULT_NEW_TOKENS = 20
_LEAST_TEMPERATURE = 0.05


class Refused(InvalidArgument):
    """A refusal whose status has TGIS's text, and whose details name the field."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(field, text)
        self.message = text

    def rename(self, field: str) -> None:
        """The text stays."""
        self.field = field


def check_params(params: pb.Parameters, limits: RequestLimits) -> None:
    """Everything that TGIS says of parameters before it tokenises.

    Raises:
        Refused: in TGIS's words.
    """
    _check_decoding(params.decoding)
    _check_stopping(params.stopping, limits)
    _check_response(params.response)
    _check_sampling(params.sampling)


def adapter_of(
    request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest | pb.BatchedTokenizeRequest,
    adapters: Adapters,
) -> str:
    """The name of the adapter that is asked for; empty: none.

    Raises:
        Refused: this server takes none.
        NotFound: it has none of that name.
    """
    for field in ("adapter_id", "prefix_id"):
        if getattr(request, field) and not adapters.taken:
            raise Refused(field, "adapter_id supplied but no adapter store was configured")
    name: str = request.adapter_id or request.prefix_id
    adapters.find(name)
    return name


def too_long(error: PromptTooLong) -> Refused:
    """The same in TGIS's words."""
    text = f"input tokens ({error.tokens}) plus prefix length (0) must be < {error.most + 1}"
    return Refused(error.field, text)


def check_room(prompt_tokens: int, params: pb.Parameters, limits: RequestLimits) -> None:
    """Whether the least that is asked for fits."""
    least, most = params.stopping.min_new_tokens, limits.max_total_tokens
    if prompt_tokens + least > most:
        raise Refused(
            "params.stopping.min_new_tokens",
            f"input tokens ({prompt_tokens}) plus prefix length (0) plus min_new_tokens ({least})"
            f" must be <= {most}",
        )


# -- parts -------------------------------------------------------------------------------------


def _check_decoding(decoding: pb.DecodingParameters) -> None:
    if decoding.HasField("length_penalty"):
        field, factor = "decoding.length_penalty", decoding.length_penalty.decay_factor
        _expect(1 <= factor <= 10, field, "length_penalty must be >= 1.0 and <= 10.0")
    penalty = decoding.repetition_penalty
    text = "repetition_penalty must be > 0.0 and <= 2.0"
    _expect(0 <= penalty <= 2, "decoding.repetition_penalty", text)


def _check_stopping(stopping: pb.StoppingCriteria, limits: RequestLimits) -> None:
    most = most_new_tokens(limits)
    text = f"max_new_tokens must be <= {most}"
    _expect(stopping.max_new_tokens <= most, "stopping.max_new_tokens", text)
    wanted = stopping.max_new_tokens or DEFAULT_NEW_TOKENS
    text = "min_new_tokens must be <= max_new_tokens"
    _expect(stopping.min_new_tokens <= wanted, "stopping.min_new_tokens", text)
    stops = stopping.stop_sequences
    fine = len(stops) <= MOST_STOPS and all(
        0 < len(stop.encode()) <= MOST_STOP_BYTES for stop in stops
    )
    text = f"can specify at most {MOST_STOPS} non-empty stop sequences, "
    text += f"each not more than {MOST_STOP_BYTES} UTF8 bytes"
    _expect(fine, "stopping.stop_sequences", text)


def _check_response(response: pb.ResponseOptions) -> None:
    top = response.top_n_tokens
    text = f"top_n_tokens ({top}) must be <= {MOST_TOP_TOKENS}"
    _expect(top <= MOST_TOP_TOKENS, "response.top_n_tokens", text)
    extra = response.token_logprobs or response.token_ranks or top
    text = "must request input and/or generated tokens to request extra token detail"
    _expect(not extra or response.input_tokens or response.generated_tokens, "response", text)


def _check_sampling(sampling: pb.SamplingParameters) -> None:
    temperature = sampling.temperature
    fine = temperature == 0 or _LEAST_TEMPERATURE <= temperature <= 100
    text = f"temperature must be >= {_LEAST_TEMPERATURE}"
    _expect(fine, "sampling.temperature", text)
    _expect(0 <= sampling.top_p <= 1, "sampling.top_p", "top_p must be > 0.0 and <= 1.0")
    _expect(0 <= sampling.typical_p <= 1, "sampling.typical_p", "typical_p must be <= 1.0")


def most_new_tokens(limits: RequestLimits) -> int:
    """Of `max_new_tokens`: a prompt has one token at least."""
    return limits.max_total_tokens - 1


def _expect(fine: object, field: str, text: str) -> None:
    if not fine:
        raise Refused(f"params.{field}", text)
