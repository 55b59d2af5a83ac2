"""Which settings contradict each other. Each fault is one line: flag, value, limit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from tokenpod.service.config.resolved import ResolvedSettings, named_adapters

#: A unix socket's path has at most 107 bytes on Linux.
_MOST_SOCKET_BYTES = 107
#: What it ends in until the model is ready.
SOCKET_SUFFIX = ".new"

_FILES = (
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "auth_token_file",
    "adapter_token_file",
    "admin_token_file",
    "shard_tls_cert",
    "shard_tls_key",
    "shard_tls_ca",
)

#: Limits in tokens, or in bytes: the smaller one, the larger one, and whether they may be equal.
_ORDERED = [
    ("max_input_tokens", "max_total_tokens", False),
    ("max_total_tokens", "max_batch_total_tokens", True),
    ("max_input_tokens", "max_batch_total_tokens", False),
    ("max_batch_prefill_tokens", "max_batch_total_tokens", True),
    ("max_input_tokens", "max_queue_tokens", True),
    ("max_message_bytes", "max_front_end_bytes", True),
]


#: The admissions under which memory may run out.
_PREEMPTING = ("optimistic", "past_future")


def flag(name: str) -> str:
    """`max_best_of` as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def contradictions(settings: ResolvedSettings) -> Iterator[str]:
    """What is wrong with settings that are right one by one."""
    yield from _model_faults(settings)
    yield from _order_faults(settings)
    yield from _memory_faults(settings)
    yield from _preemption_faults(settings)
    yield from _adapter_faults(settings)
    yield from _batching_faults(settings)
    yield from _draft_faults(settings)
    yield from _deterministic_faults(settings)
    yield from _network_faults(settings)
    yield from _telemetry_faults(settings)
    yield from _shard_faults(settings)
    yield from _security_faults(settings)


def _model_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.quantize_head and s.quantize == "none":
        yield "--quantize-head needs --quantize: it says what the head is made into"
    if s.config_override is None:
        return
    try:
        value = json.loads(s.config_override)
    except (ValueError, RecursionError) as error:
        yield f"--config-override is {s.config_override[:80]}: it is not JSON ({error})"
        return
    if not isinstance(value, dict):
        yield f"--config-override is {s.config_override[:80]}: it must be a JSON object"


def _order_faults(s: ResolvedSettings) -> Iterator[str]:
    for small, large, may_equal in _ORDERED:
        low, high = getattr(s, small), getattr(s, large)
        if low is None or high is None or low < high or (may_equal and low == high):
            continue
        limit = "at most" if may_equal else "less than"
        yield f"{flag(small)} is {low}: it must be {limit} {flag(large)}, which is {high}"


def _memory_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.kv_cache_dtype == "fp8_e4m3" and s.resolved_device == "cpu":
        yield (
            "--kv-cache-dtype is fp8_e4m3: it needs a GPU, and the model runs on a CPU, which takes"
            " int8"
        )
    if s.kv_cache_dtype == "int8" and s.resolved_device != "cpu":
        yield (
            "--kv-cache-dtype is int8: it is for CPUs, and the model runs on a GPU, which takes"
            " fp8_e4m3"
        )


def _preemption_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.preemption == "auto":
        return
    if s.admission not in _PREEMPTING:
        allowed = " or ".join(_PREEMPTING)
        yield f"--preemption is {s.preemption}: it needs --admission {allowed}, not {s.admission}"
    elif s.preemption != "recompute" and not s.host_kv_bytes:
        yield f"--preemption is {s.preemption}: it needs --host-kv-bytes"


def _adapter_faults(s: ResolvedSettings) -> Iterator[str]:
    try:
        named = named_adapters(s.lora_adapters)
    except ValueError as error:
        yield f"--lora-adapters is {(s.lora_adapters or '')[:80]}: {error}"
        return
    if len(named) > s.max_loaded_adapters:
        yield (
            f"--lora-adapters names {len(named)}: at most --max-loaded-adapters, which is"
            f" {s.max_loaded_adapters}, are kept"
        )
    if s.lora_fuse and len(named) != 1:
        yield f"--lora-fuse is set: --lora-adapters must name one adapter, and names {len(named)}"
    if s.adapter_folder is not None and not s.adapter_folder.is_dir():
        yield f"--adapter-folder is {s.adapter_folder}: there is no such folder"
    if s.max_adapter_heads > s.resolved_adapters and not s.lora_fuse:
        yield (
            f"--max-adapter-heads is {s.max_adapter_heads}: at most --max-adapters, which is"
            f" {s.resolved_adapters}, can be in a step"
        )
    if s.lora_vocabulary and not s.resolved_adapters and not s.lora_fuse:
        yield "--lora-vocabulary is set: --max-adapters is 0, so there are no slots for LoRA"
    if s.adapter_token_file is None:
        return
    if s.adapter_folder is None:
        yield f"--adapter-token-file is {s.adapter_token_file}: --adapter-folder is needed with it"
    if s.max_adapters is None and not named:
        yield f"--adapter-token-file is {s.adapter_token_file}: --max-adapters is needed with it"


def _batching_faults(s: ResolvedSettings) -> Iterator[str]:
    whole = s.most_whole_prompt
    if whole is None:
        for name in ("waiting_served_ratio", "max_waiting_tokens"):
            if (value := getattr(s, name)) is not None:
                yield f"{flag(name)} is {value}: it needs --batching alternate"
    elif s.max_input_tokens is not None and s.max_input_tokens > whole:
        yield (
            f"--max-input-tokens is {s.max_input_tokens}: with --batching alternate it must be at"
            f" most --max-batch-prefill-tokens, which is {whole}"
        )


def _draft_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.draft_model is not None and not s.speculate:
        yield f"--draft-model is {s.draft_model}: --speculate is needed with it"


def _deterministic_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.deterministic and s.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype is {s.kv_cache_dtype}: with --deterministic it must be auto"


def _network_faults(s: ResolvedSettings) -> Iterator[str]:
    ports = ("port", "health_port", "tgis_port", "loopback_port", "metrics_port")
    for one, other in combinations(ports, 2):
        if getattr(s, one) == getattr(s, other) != 0:
            yield f"{flag(one)} and {flag(other)} are both {getattr(s, one)}: they must differ"
    if s.uds_path is not None:
        size, folder = len(os.fsencode(s.uds_path)), Path(s.uds_path).parent
        most = _MOST_SOCKET_BYTES - len(f"-{s.first_rank}{SOCKET_SUFFIX}")
        if size > most:
            yield f"--uds-path has {size} bytes: at most {most} are possible"
        elif not folder.is_dir():
            yield f"--uds-path is {s.uds_path}: there is no folder {folder}"
        elif not os.access(folder, os.W_OK):
            yield f"--uds-path is {s.uds_path}: this user can't write to {folder}"
    if s.uds_group is not None and s.uds_path is None:
        yield f"--uds-group is {s.uds_group}: --uds-path is needed with it"


def _telemetry_faults(s: ResolvedSettings) -> Iterator[str]:
    if unknown := sorted(s.resolved_metrics_names - {"vllm", "tgi"}):
        yield f"--metrics-names has {', '.join(map(repr, unknown))}: there are vllm and tgi"
    if s.metrics_names and not s.metrics_port:
        yield f"--metrics-names is {s.metrics_names}: --metrics-port is needed with it"


def _shard_faults(s: ResolvedSettings) -> Iterator[str]:
    if s.node_rank >= s.num_nodes:
        yield (
            f"--node-rank is {s.node_rank}: it must be less than --num-nodes, which is"
            f" {s.num_nodes}"
        )
    if s.num_nodes > 1:
        if s.master_addr is None:
            yield f"--num-nodes is {s.num_nodes}: --master-addr is needed with it"
        ports = {name: getattr(s, name) for name in ("master_port", "shard_port")}
        own = {name: getattr(s, name) for name in ("port", "health_port", "metrics_port")}
        ports |= own
        for name, other in combinations(ports, 2):
            if ports[name] == ports[other] != 0 and not {name, other} <= own.keys():
                yield f"{flag(name)} and {flag(other)} are both {ports[name]}: they must differ"
    tls = ("shard_tls_cert", "shard_tls_key", "shard_tls_ca")
    given = [name for name in tls if getattr(s, name) is not None]
    if given and len(given) < len(tls):
        lacking = " and ".join(flag(name) for name in tls if name not in given)
        yield f"{flag(given[0])} is {getattr(s, given[0])}: {lacking} is needed with it"


def _security_faults(s: ResolvedSettings) -> Iterator[str]:
    if (s.tls_cert is None) != (s.tls_key is None):
        given, lacking = ("tls_cert", "tls_key") if s.tls_cert else ("tls_key", "tls_cert")
        yield f"{flag(given)} is {getattr(s, given)}: {flag(lacking)} is needed with it"
    if s.loopback_port and s.tls_cert is None:
        # What tells its calls from others is that they come without TLS.
        yield f"--loopback-port is {s.loopback_port}: --tls-cert is needed with it"
    if s.tls_client_ca is not None and s.tls_cert is None:
        yield f"--tls-client-ca is {s.tls_client_ca}: --tls-cert is needed with it"
    for name in _FILES:
        path: Path | None = getattr(s, name)
        if path is None:
            continue
        if not os.access(path, os.R_OK):
            yield f"{flag(name)} is {path}: it can't be read by this user"
        elif path.stat().st_size == 0:
            yield f"{flag(name)} is {path}: the file is empty"
