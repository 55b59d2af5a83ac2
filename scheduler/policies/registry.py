"""The policies by the names that operators know; `Scheduler` takes what these functions return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokenpod.scheduler.admission import Admission
from tokenpod.scheduler.alternate import Alternate
from tokenpod.scheduler.batching import Batching, Mixed
from tokenpod.scheduler.exact import Exact
from tokenpod.scheduler.optimistic import Optimistic
from tokenpod.scheduler.past_future import PastFuture
from tokenpod.scheduler.reserve import Reserve
from tokenpod.scheduler.table import Table
from tokenpod.scheduler.work import Limits

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
