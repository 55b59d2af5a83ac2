"""An admission policy that nothing knows: one class, given to the scheduler, is all there is."""

from __future__ import annotations

import pytest

from support.engines.demo_engine import Recorder, demo_model, requests, routed, serve
from tokenpod.scheduler.policies.admission_policy import SLACK, Admission, Needs
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.scheduler import Limits
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.simulator.machines import MACHINES
from tokenpod.simulator.simulator import Outcome, Simulator
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.trace import Arrival

pytestmark = pytest.mark.compute


class Halved(Admission):
    """Takes every output to end half-way; where one does not, who came last gives way."""

    preempts = True

    def held(self, needs: Needs) -> Ints:
        """What it has, and must compute before its next output."""
        return needs.computed - needs.shared

    def growth(self, needs: Needs) -> Ints:
        """Half of what it can grow by."""
        return needs.left // 2

    def end(self, needs: Needs, growth: Ints) -> Ints:
        """Once it has grown by that."""
        return needs.delay + needs.pace * growth + SLACK


def test_it_admits_more_and_preempts_and_changes_no_token():
    model, told = demo_model(), {}
    for policy in (Exact, Halved):
        link = Recorder(requests(), routed())
        told[policy], _ = serve(
            model, link, rows=17, prefill=64, overlap=True, slots=140, admission=policy
        )
    assert told[Exact].load.preemptions == 0
    assert told[Halved].load.preemptions > 0
    assert told[Halved].tokens == told[Exact].tokens


def simulated(policy: type[Admission]) -> Outcome:
    of = MACHINES["h200"]
    load = [Arrival(0.01 * i, 200, 100, 400) for i in range(300)]
    scheduler = SkippingScheduler(Limits(20_000, 256, 4096, of.prefill_tokens), admission=policy)
    return Simulator(scheduler, of.step_times, load, 1024, overlap=of.overlap).run()


def test_the_simulator_says_what_it_is_worth():
    exact, halved = simulated(Exact), simulated(Halved)
    assert [len(tokens) for tokens in halved.tokens] == [100] * 300
    assert halved.mean_use > exact.mean_use
    assert halved.end < exact.end
