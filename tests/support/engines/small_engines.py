"""Tiny models behind an engine's loop, in the test's process: whole but for sockets."""

from __future__ import annotations

import random

import torch

from support.engines.engine_link import Client
from support.engines.planner_probe import preempt_sequence
from tokenpod.core.messages import EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
ROWS, POSITIONS, PREFILL, NEW_TOKENS = 5, 200, 16, 24


def load(folder, device=CPU, drafts=0):
    return load_model(
        folder,
        dtype=None,
        device=device,
        progress=lambda done, total: None,
        max_total_tokens=POSITIONS,
        drafts=drafts,
    )


class Engine:
    """A loaded model, and a loop over it."""

    def __init__(self, folder, prefill=PREFILL, **more):
        self.model = load(folder, drafts=more.get("speculate", 0))
        self.options = options = EngineOptions(
            model_folder="",
            dtype=None,
            device="cpu",
            threads=1,
            max_batch_size=ROWS,
            max_batch_prefill_tokens=prefill,
            **more,
        )
        made = assemble(self.model, options, positions=POSITIONS, device=CPU)
        own = self.model.config.own_state
        self.room, self.pool = made.room, made.executor._pool
        self.executor = made.executor
        self.limits = Limits(
            made.slots,
            made.room.rows,
            POSITIONS,
            prefill,
            sharing=own is None,
            snapshots=made.room.snapshot_limits,
            scores_prompts=own is None or own.scores_prompts,
            offload_slots=made.offload_slots,
            own_positions=self.model.config.own_positions,
            mutual=self.model.config.mutual,
            mutual_prompts=self.model.config.mutual_prompts,
        )

    def answer(
        self, requests, *, preempt=0.0, abort=(), one_by_one=False, limits=None, drafting=None
    ):
        """Serve all, at once or one behind the other; before each turn every sequence is preempted
        by chance. `drafting`: see `guessing.drafting`.
        """
        self.executor.release(range(ROWS + 1))
        waiting = list(requests) if one_by_one else []
        client = Client([waiting.pop(0)] if waiting else requests)
        scheduler = Scheduler(limits or self.limits, drafting=drafting)
        loop = EngineLoop(client, scheduler, self.executor)
        chance, self.preempted, turns = random.Random(3), 0, 0
        while client.left or waiting:
            if not client.left:
                request = waiting.pop(0)
                client.inbox.append(request)
                client.left |= {*request.sequence_ids}
            for sequence in sorted(client.left):
                if chance.random() < preempt:
                    self.preempted += preempt_sequence(scheduler, sequence)
            loop.turn()
            turns += 1
            if turns == 4:
                scheduler.abort(abort)
                client.left -= set(abort)
            scheduler.check()
        loop.turn()
        return client


def requests_of(prompts, *, scored):
    return [
        Request(
            [i],
            prompt,
            SamplingParams(),
            StoppingParams(max_new_tokens=NEW_TOKENS - 3 * (i % 3)),
            logprobs=True,
            prompt_logprobs=scored,
        )
        for i, prompt in enumerate(prompts)
    ]
