"""An engine with a head that drafts, and what it drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from support.engines.demo_engine import CPU, POSITIONS, Recorder
from support.kernels.interpreted import DEVICE
from support.steps import step_scenes, stepping
from tokenpod.core.plan import LAST
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.drafts.draft import draft_of
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.steps.open_drafts import Unknown
from tokenpod.scheduler.drafts.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.sequences.work import SnapshotLimits

SLOTS, MOST = 160, 2


class Watching:
    """An executor, and what was drafted behind how many tokens of which row."""

    def __init__(self, executor):
        self._executor = executor
        self._found = {}

    def launch(self, plan):
        return Watched(plan, self._executor.launch(plan), self._found)

    def drafts(self):
        """Since it was last asked; all steps have been waited for."""
        found = dict(self._found)
        self._found.clear()
        return found


class Watched:
    """A step under way, whose drafts are noted in `found` once they are there."""

    def __init__(self, plan, launched, found):
        self._plan, self._launched, self._found = plan, launched, found
        self.sample = launched.sample

    def wait(self):
        result, unknown = self._launched.wait(), Unknown.of(self._plan)
        drafts = iter(result.drafts)
        if unknown is not None:
            for row, count in zip(unknown.rows, unknown.counts, strict=True):
                where = int(self._plan.r_row[row]), int(self._plan.r_start[row]) + 1
                self._found[where] = [*islice(drafts, int(count))]
        assert not [*drafts]
        return result


def pool_of(model):
    layouts = model.config.kv_layouts
    return model.pool_class(slots=SLOTS, layouts=layouts, dtype=torch.float32, device=CPU)


def drafts_behind(one, two, n):
    """The `n` drafts, at most two: the likeliest behind a text and, by `two(token)`, behind that.

    `one`: [vocabulary] what may follow the text.
    """
    first = int(one.argmax())
    return [first, int(two(first).argmax())][:n]


def answer(served, asked, head=None, prefill=8, most=MOST):
    """What was said, and the drafts; the second request comes when the first has ended."""
    draft = None
    kept, limits = pool_of(served), Limits(SLOTS - 16, 2, POSITIONS, prefill)
    if served.config.own_state is not None:
        snapshots = SnapshotLimits(8, 3, least=2, stride=5)
        limits = replace(limits, sharing=False, snapshots=snapshots)
        kept.reserve(snapshots.first + snapshots.total)
    if head is not None:
        own = pool_of(head)
        draft = draft_of(head, served, own, most, rows=3)
    executor = Watching(
        CpuExecutor(served, kept, rows=3, vocab_size=served.config.vocab_size, draft=draft)
    )
    guesses = None if head is None else partial(Drafting, ModelDrafts(), most)
    scheduler = Scheduler(limits, drafting=guesses)
    link = Recorder(asked)
    link.inbox = []
    loop = EngineLoop(link, scheduler, executor)
    found = []
    for request in asked:
        link.inbox.append(request)
        for _ in range(200):
            if request.sequence_ids[0] in link.finished:
                break
            loop.turn()
        found.append(executor.drafts())
    assert link.done
    return link, found


def check_that_devices_draft_alike(folder, head, drafts):
    """What a device drafts of three rows, so many tokens each, is what a host drafts."""
    told = []
    for kind in ("fast", "device"):
        device = CPU if kind == "fast" else DEVICE
        executor = Watching(step_scenes.make(kind, folder, device, head=head))
        rows = stepping.rows_of(stepping.requests(tops=False))
        # The first prompt has one token; the others are computed in two pieces.
        whole = [(row, row.prompt(0, 1 + row.row)) for row in rows]
        stepping.run_step(executor, whole)
        rest = [(row, row.prompt(1 + row.row, len(row.request.prompt))) for row in rows[1:]]
        stepping.run_step(executor, [*rest, (rows[0], rows[0].step())])
        stepping.go_on(executor, rows, lambda row, outputs: [LAST] * drafts[row])
        told.append(([row.outputs for row in rows], executor.drafts()))
        assert len(told[-1][1]) > 5
        assert all(LAST not in found for found in told[-1][1].values())
    assert told[0] == told[1]
