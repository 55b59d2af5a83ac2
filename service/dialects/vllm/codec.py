"""Requests of `vllm.grpc.engine` to plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

from tokenpod.service.calls.call import (
    AskedConstraint,
    ConstraintKind,
    GenerateCall,
    Output,
    Prompt,
    Sampling,
    Stopping,
)
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenTensor, GivenTensors
from tokenpod.service.calls.limits import RequestLimits
from tokenpod.service.dialects.fields import copied, given
from tokenpod.service.images.given_tensors import PIXELS

#: What OpenAI's API lets a client ask for, and vLLM by default.
MOST_TOP_TOKENS = 20
_MOST_SEED = 1 << 64

#: Where fields of `GenerateCall` lie in a request.
FIELDS = {
    "sampling": "sampling_params",
    "stopping": "sampling_params",
    "stopping.max_new_tokens": "sampling_params.max_tokens",
    "stopping.min_new_tokens": "sampling_params.min_tokens",
    "stopping.stop_sequences": "sampling_params.stop",
    "output.top_n_tokens": "sampling_params.logprobs",
    "output.prompt_top_n_tokens": "sampling_params.prompt_logprobs",
    "token_ids.ids": "tokenized.input_ids",
    "prompt": "input",
    "truncate": "sampling_params.truncate_prompt_tokens",
}
#: What this server does not do; a gateway makes HTTP's 400 of the refusal.
_UNBUILT = (
    *("kv_transfer_params", "kv_transfer_params_json", "extra_mm_inputs"),
    "media_refs",
)


async def generate_call(request: pb.GenerateRequest, limits: RequestLimits) -> GenerateCall:
    """What `request` asks for. Other tasks get their turn while long lists are copied.

    Raises InvalidArgument for what this server does not do.
    """
    _check_built(request)
    params = request.sampling_params
    top = _count(params, "logprobs")
    return GenerateCall(
        prompt=await _prompt(request),
        sampling=_sampling(params, limits),
        stopping=_stopping(params),
        output=Output(
            stream=request.stream,
            logprobs=top is not None,
            top_n_tokens=top or 0,
            prompt_logprobs=_count(params, "prompt_logprobs") is not None,
            prompt_top_n_tokens=_count(params, "prompt_logprobs") or 0,
            text=False,
            skip_special_tokens=params.skip_special_tokens,
        ),
        truncate=_truncate(params, limits),
        request_id=request.request_id,
        constraint=_constraint(params),
        tensors=_tensors(request) if request.HasField("mm_inputs") else None,
    )


# -- parts -------------------------------------------------------------------------------------


def _check_built(request: pb.GenerateRequest) -> None:
    for field, _ in request.ListFields():
        if field.name in _UNBUILT:
            raise InvalidArgument(field.name, "is not supported by this server")
    if request.data_parallel_rank:
        problem = f"is {request.data_parallel_rank}; this server is one rank, 0"
        raise InvalidArgument("data_parallel_rank", problem)


def _tensors(request: pb.GenerateRequest) -> GivenTensors:
    """The images of a prompt of tokens: whether they are true is checked later."""
    given, field = request.mm_inputs, "mm_inputs"
    if request.WhichOneof("input") != "tokenized":
        raise InvalidArgument(field, "is there without tokenized: tokens of images stand in it")
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        problem = "is set beside mm_inputs, whose places it would move"
        raise InvalidArgument("sampling_params.truncate_prompt_tokens", problem)
    if given.modality not in (common.MODALITY_UNSPECIFIED, common.IMAGE):
        raise InvalidArgument(f"{field}.modality", "is not supported by this server: images are")
    if given.encoder_input_key not in ("", PIXELS):
        raise InvalidArgument(f"{field}.encoder_input_key", f"is not {PIXELS}")
    if len(given.mm_hashes) not in (0, len(given.mm_placeholders)):
        problem = f"has {len(given.mm_hashes)} of {len(given.mm_placeholders)} images"
        raise InvalidArgument(f"{field}.mm_hashes", problem)
    found = {PIXELS: _tensor(given.pixel_values, f"{field}.{PIXELS}")}
    for name, tensor in given.model_specific_tensors.items():
        # How to cut tensors, of which their own numbers tell.
        if name not in given.flat_keys.values():
            found[name] = _tensor(tensor, f"{field}.model_specific_tensors[{name:.60}]")
    places = [(place.offset, place.length) for place in given.mm_placeholders]
    return GivenTensors(found, places, field)


def _tensor(tensor: pb.TensorData, field: str) -> GivenTensor:
    if tensor.WhichOneof("payload") not in (None, "inline"):
        raise InvalidArgument(field, "is not inline: nothing else is supported by this server")
    return GivenTensor(tensor.dtype, [*tensor.shape], tensor.inline)


def _constraint(params: pb.SamplingParams) -> AskedConstraint | None:
    kind = params.WhichOneof("constraint")
    field = f"sampling_params.{kind}"
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    if kind == "choice":
        texts = tuple(params.choice.choices)
        return AskedConstraint(ConstraintKind.CHOICE, f"{field}.choices", texts=texts)
    text = "" if kind == "json_object" else getattr(params, kind)
    return AskedConstraint(ConstraintKind[kind.upper()], field, text)


def _sampling(params: pb.SamplingParams, limits: RequestLimits) -> Sampling:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    biases = dict(_biases(params, limits))
    same = given(params, Sampling) | {"logit_bias": biases, "temperature": temperature}
    if params.HasField("seed"):
        same["seed"] = params.seed % _MOST_SEED
    return Sampling(**same, do_sample=temperature != 0)


def _biases(params: pb.SamplingParams, limits: RequestLimits) -> Iterator[tuple[int, float]]:
    for token, bias in params.logit_bias.items():
        if token < 0:
            problem = f"is {token}; token ids of this model are from 0 to {limits.vocab_size - 1}"
            raise InvalidArgument(f"sampling_params.logit_bias[{token}]", problem)
        yield token, bias


def _stopping(params: pb.SamplingParams) -> Stopping:
    return Stopping(
        **given(params, Stopping),
        max_new_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_new_tokens=params.min_tokens,
        stop_sequences=tuple(params.stop),
        include_stop_sequence=params.include_stop_str_in_output,
        shorten=True,
    )


def _count(params: pb.SamplingParams, name: str) -> int | None:
    """How many of the most likely tokens are asked for; None: no log probabilities at all."""
    if not params.HasField(name):
        return None
    count: Any = getattr(params, name)
    if count < 0:
        problem = f"is {count}; at most {MOST_TOP_TOKENS} tokens can be told, and not all"
        raise InvalidArgument(f"sampling_params.{name}", problem)
    return int(count)


def _truncate(params: pb.SamplingParams, limits: RequestLimits) -> int:
    if not params.HasField("truncate_prompt_tokens"):
        return 0
    kept = params.truncate_prompt_tokens
    if kept == 0 or kept < -1:
        problem = f"is {kept}; must be at least 1, or -1 for as many as fit"
        raise InvalidArgument("sampling_params.truncate_prompt_tokens", problem)
    return limits.max_input_tokens if kept == -1 else kept


async def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return str(request.text)
        case "tokenized":
            return await copied(request.tokenized.input_ids)
        case _:
            return None
