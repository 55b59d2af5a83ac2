"""What is served and how busy it is, as messages of `tokenpod.v1`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from google.protobuf.descriptor import Descriptor
from google.protobuf.timestamp_pb2 import Timestamp

from tokenpod.core.adapters import AdapterKind
from tokenpod.core.messages import AdapterFacts
from tokenpod.core.task import Task, VectorFacts
from tokenpod.service.admission.admission import Admission
from tokenpod.service.calls.embedding import MOST_VECTOR_BYTES
from tokenpod.service.calls.limits import MOST_CHAT_MESSAGES, MOST_RETURNED_IDS
from tokenpod.service.dialects.fields import is_map
from tokenpod.service.serving.reading import read_limits
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.tokenizers.chat_template import roles_of, takes_tools
from tokenpod_client.protos.tokenpod.v1 import adapter_pb2, generation_pb2, model_pb2
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb

_KINDS = {
    AdapterKind.LORA: adapter_pb2.ADAPTER_KIND_LORA,
    AdapterKind.PROMPT: adapter_pb2.ADAPTER_KIND_PROMPT,
    AdapterKind.PREFIX: adapter_pb2.ADAPTER_KIND_PREFIX,
}

_TASKS = {
    Task.GENERATE: model_pb2.TASK_GENERATE,
    Task.EMBED: model_pb2.TASK_EMBED,
    Task.SCORE: model_pb2.TASK_SCORE,
    Task.CLASSIFY: model_pb2.TASK_CLASSIFY,
}


def model_of(serving: Serving) -> model_pb2.Model:
    """The model, and every limit as it is in force."""
    ready, tokenizer = serving.ready, serving.tokenizer
    template, formats = tokenizer.template_source, serving.formats
    adapters = serving.adapters
    model = model_pb2.Model(
        name=serving.model_id,
        context_length=ready.max_positions,
        vocabulary_size=ready.vocab_size,
        limits=_limits(serving),
        features=_features(serving),
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        server_version=version("tokenpod"),
        dtype=ready.dtype,
        quantization=ready.quantization,
        kv_cache_dtype=ready.kv_cache_dtype,
        device_type=ready.device_type,
        rope_scaling=ready.rope,
        parameter_count=ready.parameters,
        adapter_count=len(adapters.loaded),
        max_adapters=adapters.slots,
        max_adapter_rank=serving.settings.max_adapter_rank if adapters.slots else 0,
        lora_vocabulary=serving.settings.lora_vocabulary and adapters.slots > 0,
        draft_method=ready.draft_method,
        host_token_count=ready.offload_slots,
        no_prefix_cache=ready.no_prefix_cache,
        task=_TASKS[ready.task],
        sampling_defaults=generation_pb2.SamplingOptions(**serving.encoder.defaults),
    )
    if ready.vectors is not None:
        model.embedding.CopyFrom(_embedding(serving, ready.vectors))
    if template is not None:
        model.chat_template.source = template
        model.chat_template.roles.extend(roles_of(template))
        model.chat_template.tool_parser = formats.calls.name if formats.calls else ""
        model.chat_template.reasoning_parser = formats.reasoning.name if formats.reasoning else ""
    return model


def _embedding(serving: Serving, facts: VectorFacts) -> model_pb2.EmbeddingFacts:
    limits = read_limits(serving)
    return model_pb2.EmbeddingFacts(
        dimensions=facts.width,
        token_dimensions=facts.token_width,
        pooling=facts.pooling,
        normalized=facts.normalized,
        max_tokens=limits.max_tokens,
        max_texts=limits.max_texts,
        max_call_tokens=limits.max_call_tokens,
        max_vector_bytes=MOST_VECTOR_BYTES,
        prompts=facts.prompts,
        default_prompt_name=facts.default_prompt,
        labels=facts.labels,
        instruction=facts.instruction,
        sparse=not facts.no_sparse,
    )


def adapter_of(facts: AdapterFacts) -> adapter_pb2.Adapter:
    """The message that describes an adapter."""
    return adapter_pb2.Adapter(
        name=facts.name,
        kind=_KINDS[facts.kind],
        digest=f"sha256:{facts.digest}",
        lora_rank=facts.rank,
        size_bytes=facts.nbytes,
        virtual_token_count=facts.virtual_tokens,
    )


def load_of(serving: Serving, admission: Admission) -> pb.GetLoadResponse:
    """How busy the pod is."""
    load, slots = admission.whole(serving.client.load), serving.ready.slots
    ended = load.ended
    # Before its first step the engine has told nothing.
    free = load.free_slots + load.evictable_slots if load.slots else slots
    since = Timestamp()
    since.FromNanoseconds(serving.since)
    return pb.GetLoadResponse(
        start_time=since,
        request_count=admission.counters.requests,
        running_sequence_count=load.running,
        waiting_sequence_count=load.waiting,
        waiting_token_count=load.waiting_tokens,
        used_token_count=max(slots - free, 0),
        evictable_token_count=load.evictable_slots,
        total_token_count=slots,
        prompt_token_count=load.prompt_tokens,
        cached_token_count=load.cached_tokens,
        evicted_token_count=load.evicted_tokens,
        swapped_sequence_count=load.swapped,
        preemption_count=load.preemptions,
        swapped_token_count=load.swapped_tokens,
        stopped_request_count=ended.stopped,
        length_request_count=ended.length,
        aborted_request_count=ended.aborted,
        oversized_request_count=ended.ignored,
        drafted_token_count=load.drafted_tokens,
        accepted_token_count=load.accepted_tokens,
        fetched_token_count=load.fetched_tokens,
        host_used_token_count=load.offload_used_slots,
        host_total_token_count=serving.ready.offload_slots,
    )


def _tools(serving: Serving) -> bool:
    """Whether requests may have tools."""
    template = serving.tokenizer.template_source
    return template is not None and serving.formats.calls is not None and takes_tools(template)


def _limits(serving: Serving) -> model_pb2.Limits:
    limits, settings = serving.limits, serving.settings
    return model_pb2.Limits(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_total_tokens=limits.slots,
        max_samples=min(limits.max_samples, limits.rows),
        max_stop_sequences=limits.max_stop_sequences,
        max_stop_sequence_bytes=limits.max_stop_sequence_bytes,
        max_top_n_tokens=min(limits.max_top_n_tokens, limits.vocab_size),
        max_logit_biases=limits.max_logit_bias,
        max_chat_messages=MOST_CHAT_MESSAGES,
        max_tokenize_tokens=MOST_RETURNED_IDS,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_requests=settings.requests_taken(limits.rows),
        max_queue_tokens=settings.resolved_queue_tokens(limits.slots),
        max_batch_size=limits.rows,
        max_draft_tokens=limits.drafts,
    )


#: Fields of requests with tools.
_TOOLS = ("chat.tools", "chat.tool_choice", "chat.parallel_tool_calls")


def _features(serving: Serving) -> list[str]:
    """Paths of the fields of a GenerateRequest that this server takes."""
    if serving.ready.task.pools:
        return []
    left_out: tuple[str, ...] = ()
    if serving.tokenizer.template_source is None:
        left_out += ("chat",)
    elif not _tools(serving):
        left_out += _TOOLS
    if not serving.adapters.taken:
        left_out += ("adapter",)
    if not serving.tokenizer.tells_bytes:
        left_out += ("constraint",)
    if not serving.images.served:
        left_out += ("chat.messages.content.image",)
    if not serving.images.fetched:
        left_out += ("chat.messages.content.image.uri",)
    paths = _paths(generation_pb2.GenerateRequest.DESCRIPTOR, "")
    return [path for path in paths if not f"{path}.".startswith(tuple(f"{x}." for x in left_out))]


def _paths(kind: Descriptor, above: str) -> Iterator[str]:
    for field in kind.fields:
        path = f"{above}{field.name}"
        if field.message_type is None or is_map(field) or not _divisible(field.message_type):
            yield path
        else:
            yield from _paths(field.message_type, f"{path}.")


def _divisible(kind: Descriptor) -> bool:
    """Whether a message has fields of this protocol: google's are values, and some have none."""
    return bool(kind.file.package == generation_pb2.DESCRIPTOR.package and kind.fields)
