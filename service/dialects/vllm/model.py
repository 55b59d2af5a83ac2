"""What is served and how busy it is, as messages of `vllm.grpc.engine`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from tokenpod.core.messages import BLOCK_TOKENS
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.tokenizer_archive import config_of

#: The kind of server that a gateway sees.
_SERVER_TYPE = "vllm-grpc"


def model_info(serving: Serving) -> pb.GetModelInfoResponse:
    """The model, by what its folder says; takes a moment."""
    limits, config = serving.limits, config_of(serving.encoder)
    eos = sorted(serving.tokenizer.eos_token_ids)
    architectures = config.get("architectures")
    return pb.GetModelInfoResponse(
        # Not the folder: a gateway would look for it on its own machine. It asks for the files.
        model_path=serving.model_id,
        served_model_name=serving.model_id,
        is_generation=not serving.ready.task.pools,
        supports_vision=serving.images.served,
        max_context_length=limits.max_total_tokens,
        max_req_input_len=limits.max_input_tokens,
        vocab_size=limits.vocab_size,
        model_type=_text(config.get("model_type")),
        architectures=map(_text, architectures if isinstance(architectures, list) else ()),
        eos_token_ids=eos,
        bos_token_id=_token(config.get("bos_token_id")),
        pad_token_id=_token(config.get("pad_token_id")),
    )


def server_info(serving: Serving, requests: int) -> pb.GetServerInfoResponse:
    """The server; `requests`: calls under way."""
    ready, settings = serving.ready, serving.settings
    now = time.time()
    return pb.GetServerInfoResponse(
        active_requests=requests,
        is_paused=False,
        last_receive_timestamp=now,
        uptime_seconds=now - serving.since / 1e9,
        server_type=_SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=ready.kv_cache_dtype,
        block_size=BLOCK_TOKENS,
        attention_backend=ready.attention,
        model_dtype=ready.dtype,
        max_num_seqs=ready.rows or settings.resolved_batch_size,
    )


def loads(serving: Serving) -> pb.GetLoadsResponse:
    """The load of the only rank."""
    load, slots = serving.client.load, serving.ready.slots
    used = used_tokens(serving)
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version("tokenpod"),
        dp_rank_count=1,
        loads=[
            pb.SchedulerLoad(
                num_running_reqs=load.running,
                num_waiting_reqs=load.waiting,
                num_total_reqs=load.running + load.waiting,
                num_used_tokens=used,
                max_total_num_tokens=slots,
                token_usage=used / slots,
                cache_hit_rate=hit_rate(serving),
                utilization=load.running / serving.limits.rows,
                max_running_requests=serving.limits.rows,
                num_waiting_uncached_tokens=load.waiting_tokens,
            )
        ],
    )


def used_tokens(serving: Serving) -> int:
    """KV slots that sequences use; what is only cached can be evicted."""
    load, slots = serving.client.load, serving.ready.slots
    # Before its first step the engine has told nothing.
    free = load.free_slots + load.evictable_slots if load.slots else slots
    return max(slots - free, 0)


def hit_rate(serving: Serving) -> float:
    """The part of all prompt tokens that was in the cache."""
    load = serving.client.load
    return load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _token(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else 0
