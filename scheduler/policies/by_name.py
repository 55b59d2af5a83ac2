"""The policies by the names that operators know; `Scheduler` takes what these functions return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokenpod.scheduler.policies.admission_policy import Admission
from tokenpod.scheduler.policies.alternate import Alternate
from tokenpod.scheduler.policies.batching import Batching, Mixed
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.scheduler.policies.past_future import PastFuture
from tokenpod.scheduler.policies.reserve import Reserve
from tokenpod.scheduler.sequences.table import Table
from tokenpod.scheduler.sequences.work import Limits

#: --admission.
ADMISSIONS: dict[str, Callable[[Table, Limits, int], Admission]] = {
    "exact": Exact,
    "reserve": Reserve,
    "optimistic": Optimistic,
    "past_future": PastFuture,
}
#: --batching.
BATCHINGS = ("mixed", "alternate")

#: TGI's defaults, of its launcher.
WAITING_SERVED_RATIO = 0.3
MAX_WAITING_TOKENS = 20


def batching(
    name: str,
    *,
    ratio: float = WAITING_SERVED_RATIO,
    max_waiting_tokens: int = MAX_WAITING_TOKENS,
) -> Callable[[Limits], Batching]:
    """What makes the batching policy of a name; the numbers are those of `alternate`."""
    if name == "alternate":
        return partial(Alternate, ratio=ratio, max_waiting_tokens=max_waiting_tokens)
    assert name == "mixed", name
    return Mixed
