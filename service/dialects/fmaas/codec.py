"""Messages of `fmaas` to plain values."""

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
from tokenpod.service.dialects.fmaas.checks import DEFAULT_NEW_TOKENS
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
