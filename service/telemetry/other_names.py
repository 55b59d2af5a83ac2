"""The same numbers under the names that dashboards of vLLM and TGI, and llm-d's picker, read.

Only what means the same is there. Buckets are ours, not theirs. TGI's counters have no `_total`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tokenpod.core.messages import BLOCK_TOKENS
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.exposition import Metric, MoreMetrics, by_label
from tokenpod.service.telemetry.snapshots import Counts, Family, Snapshot

#: An instrument of ours, and which of its points: those whose attribute has this value, if named.
Source = tuple[str, str, str]

_FIRST_TOKEN: Source = ("gen_ai.server.time_to_first_token", "", "")
_PER_TOKEN: Source = ("gen_ai.server.time_per_output_token", "", "")
_REQUEST: Source = ("gen_ai.server.request.duration", "", "")
_INPUT: Source = ("gen_ai.client.token.usage", "gen_ai.token.type", "input")
_OUTPUT: Source = ("gen_ai.client.token.usage", "gen_ai.token.type", "output")
_QUEUE: Source = ("tokenpod.request.phase.duration", "tokenpod.phase", "queue")
_PREFILL: Source = ("tokenpod.request.phase.duration", "tokenpod.phase", "prefill")
_DECODE: Source = ("tokenpod.request.phase.duration", "tokenpod.phase", "decode")

_VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": _FIRST_TOKEN,
    "vllm:request_time_per_output_token_seconds": _PER_TOKEN,
    "vllm:e2e_request_latency_seconds": _REQUEST,
    "vllm:request_queue_time_seconds": _QUEUE,
    "vllm:request_prefill_time_seconds": _PREFILL,
    "vllm:request_decode_time_seconds": _DECODE,
    "vllm:request_prompt_tokens": _INPUT,
    "vllm:request_generation_tokens": _OUTPUT,
}
_TGI_HISTOGRAMS = {
    "tgi_request_duration": _REQUEST,
    "tgi_request_queue_duration": _QUEUE,
    "tgi_request_mean_time_per_token_duration": _PER_TOKEN,
    "tgi_request_input_length": _INPUT,
    "tgi_request_generated_tokens": _OUTPUT,
}
#: `finished_reason` by how requests ended.
_FINISHED = {"stopped": "stop", "length": "length", "aborted": "abort"}


def more_metrics(settings: ServerSettings) -> list[MoreMetrics]:
    """What makes the metrics of those other names that were asked for."""
    names = settings.resolved_metrics_names
    return [make for name, make in _makers(settings).items() if name in names]


def _makers(settings: ServerSettings) -> dict[str, MoreMetrics]:
    model = {"model_name": settings.served_name, "engine": "0"}
    adapters = settings.resolved_adapters
    return {
        "vllm": lambda snapshot: _vllm(snapshot, model, adapters),
        "tgi": _tgi,
    }


def _vllm(snapshot: Snapshot, model: dict[str, str], max_adapters: int) -> Iterator[Metric]:
    for name, ours in (
        ("num_requests_running", "tokenpod.requests.running"),
        ("num_requests_waiting", "tokenpod.queue.requests"),
        ("kv_cache_usage_perc", "tokenpod.kv.utilization"),
    ):
        yield _number(f"vllm:{name}", "gauge", snapshot.get(ours), model)
    yield _number("vllm:num_preemptions", "counter", snapshot.get("tokenpod.preemptions"), model)
    for name, source in (("prompt_tokens", _INPUT), ("generation_tokens", _OUTPUT)):
        total = _histogram_of(snapshot, source)
        yield _sample(f"vllm:{name}", "counter", model, total.sum if total else 0)
    prefixes = dict(by_label(snapshot.get("tokenpod.prefix.tokens"), "tokenpod.prefix"))
    hits = prefixes.get("cached", 0)
    queries = hits + prefixes.get("computed", 0)
    yield _sample("vllm:prefix_cache_queries", "counter", model, queries)
    yield _sample("vllm:prefix_cache_hits", "counter", model, hits)
    success = Metric("vllm:request_success", "Requests that have ended", "counter")
    for end, count in by_label(snapshot.get("tokenpod.requests.ended"), "tokenpod.end"):
        if end in _FINISHED:
            reason = {"finished_reason": _FINISHED[end]}
            success.add(model | reason, count)
    yield success
    yield from _histograms(snapshot, _VLLM_HISTOGRAMS, model)
    slots = sum(n for _, n in by_label(snapshot.get("tokenpod.kv.tokens"), "tokenpod.kv.state"))
    blocks = {
        "engine": "0",
        "block_size": str(BLOCK_TOKENS),
        "num_gpu_blocks": str(int(slots) // BLOCK_TOKENS),
    }
    yield _sample("vllm:cache_config_info", "gauge", blocks, 1)
    running = by_label(snapshot.get("tokenpod.adapter.requests"), "tokenpod.adapter")
    adapters = {
        "max_lora": str(max_adapters),
        "running_lora_adapters": ",".join(sorted(name for name, count in running if count > 0)),
        "waiting_lora_adapters": "",
    }
    # llm-d takes the series with the newest time.
    yield _sample("vllm:lora_requests_info", "gauge", adapters, time.time())


def _tgi(snapshot: Snapshot) -> Iterator[Metric]:
    yield _number("tgi_queue_size", "gauge", snapshot.get("tokenpod.queue.requests"), {})
    running = snapshot.get("tokenpod.requests.running")
    yield _number("tgi_batch_current_size", "gauge", running, {})
    duration = snapshot.get("gen_ai.server.request.duration")
    count, success, failed = 0, 0, dict[str, int]()
    for labels, counts in duration.counts.items() if duration is not None else ():
        number = sum(counts.buckets)
        count += number
        if error := dict(labels).get("error.type"):
            failed[error.lower()] = failed.get(error.lower(), 0) + number
        else:
            success += number
    yield _sample("tgi_request_count", "unknown", {}, count)
    yield _sample("tgi_request_success", "unknown", {}, success)
    failure = Metric("tgi_request_failure", "Requests that have failed", "unknown")
    for error, number in failed.items():
        failure.add({"err": error}, number)
    yield failure
    yield from _histograms(snapshot, _TGI_HISTOGRAMS, {})


def _number(name: str, kind: str, family: Family | None, labels: dict[str, str]) -> Metric:
    return _sample(name, kind, labels, sum(family.numbers.values()) if family is not None else 0)


def _sample(name: str, kind: str, labels: dict[str, str], value: float) -> Metric:
    metric = Metric(name, "See docs/telemetry.md", kind)
    metric.add(labels, value)
    return metric


def _histograms(
    snapshot: Snapshot, names: dict[str, Source], labels: dict[str, str]
) -> Iterator[Metric]:
    for name, source in names.items():
        metric = Metric(name, "See docs/telemetry.md", "histogram")
        if (counts := _histogram_of(snapshot, source)) is not None:
            metric.add_histogram(labels, snapshot[source[0]].bounds, counts)
        yield metric


def _histogram_of(snapshot: Snapshot, source: Source) -> Counts | None:
    """The sum of the points that `source` names; None: there are none."""
    name, attribute, value = source
    points = snapshot[name].counts.items() if name in snapshot else ()
    found = [
        counts for labels, counts in points if not attribute or dict(labels).get(attribute) == value
    ]
    if not found:
        return None
    buckets = [sum(column) for column in zip(*(each.buckets for each in found), strict=True)]
    return Counts(buckets, sum(each.sum for each in found))
