"""A scheduler's load: the counts that go to the service with every step."""

from __future__ import annotations

import msgspec

from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.outputs import Load
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.counts import Counts
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.planners import Planners


def load_of(
    kv: KV, planners: Planners, constrained: Constrained, adapters: AdapterSlots, counts: Counts
) -> Load:
    """The load of the scheduler whose parts these are."""
    batcher, queue = planners.batcher, planners.queue
    load = Load(
        running=batcher.running + len(planners.routed.sequences),
        waiting=len(queue) - queue.swapped + len(constrained.held),
        waiting_tokens=queue.tokens + constrained.held_tokens,
        slots=kv.total - PROBE_TOKENS,
        free_slots=max(kv.free - PROBE_TOKENS, 0),
        evictable_slots=kv.tree.evictable,
        preemptions=batcher.preemptions,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        evicted_tokens=kv.tree.evicted,
        adapters=len(adapters.in_use),
        swapped=queue.swapped,
        ended=counts.ended,
        drafted_at=[*counts.drafted],
        accepted_at=[*counts.accepted],
    )
    return load if kv.host is None else msgspec.structs.replace(load, **kv.host.counts)
