"""The fake shard's replies as v1 knows them: one token per generation."""

from __future__ import annotations

from typing import Any

from tokenpod_client.protos.generate.v1 import generate_pb2 as v1_pb2
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb


def serialize_v1(reply: Any) -> bytes:
    if not isinstance(reply, pb.PrefillResponse | pb.DecodeResponse):
        return bytes(reply.SerializeToString())
    generations = [_generation_v1(each) for each in reply.generations]
    # PrefillResponse and DecodeResponse have one form in v1.
    converted = v1_pb2.DecodeResponse(generations=generations)
    if reply.HasField("batch"):
        converted.batch.ParseFromString(reply.batch.SerializeToString())
    return bytes(converted.SerializeToString())


def _generation_v1(generation: Any) -> Any:
    tokens = generation.tokens
    converted = v1_pb2.Generation(
        request_id=generation.request_id,
        token_id=tokens.ids[0],
        token_logprob=tokens.logprobs[0],
        token_text=tokens.texts[0],
        token_is_special=tokens.is_special[0],
    )
    if generation.HasField("prefill_tokens"):
        converted.prefill_tokens.ParseFromString(generation.prefill_tokens.SerializeToString())
    if generation.HasField("generated_text"):
        converted.generated_text.ParseFromString(generation.generated_text.SerializeToString())
    if generation.top_tokens:
        (top,) = generation.top_tokens
        converted.top_tokens.ids.extend(top.ids)
        converted.top_tokens.logprobs.extend(top.logprobs)
        converted.top_tokens.texts.extend(top.texts)
        converted.top_tokens.is_special.extend(top.is_special)
    return converted
