"""EAGLE-3 heads in executors: their drafts are the definition's, and change no token."""

from __future__ import annotations

import random
from functools import partial

import eagle_heads
import pytest
import step_scenes
import stepping
import torch
from demo_engine import CPU, DEMO, POSITIONS, SAMPLED, VOCABULARY, Recorder, load, pool
from harness import free_port
from interpreted import DEVICE
from safetensors.torch import load_file

from tokenpod.core.plan import LAST
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.draft import draft_of
from tokenpod.engine.eagle_draft import EagleDraft
from tokenpod.engine.host_executor import HostExecutor
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.rounds import Unknown
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.pool import KVPool
from tokenpod.models.eagle import load_eagle
from tokenpod.scheduler.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.scheduler import Limits, Scheduler

SLOTS, MOST = 160, 2
PROMPT = [random.Random(3).randrange(3, VOCABULARY) for _ in range(21)]


@pytest.fixture(scope="module")
def served():
    torch.set_num_threads(1)
    return load(None)


class Watching:
    """An executor, and what was drafted behind how many tokens of which row."""

    def __init__(self, executor):
        self._executor = executor
        self._plans = []

    def launch(self, plan):
        unknown = Unknown.of(plan)
        if unknown is not None:
            self._plans.append((plan, unknown))
        return self._executor.launch(plan)

    def drafts(self):
        """Since it was last asked; all steps have been waited for."""
        found = {}
        for plan, unknown in self._plans:
            for row, first, count in zip(unknown.rows, unknown.firsts, unknown.counts, strict=True):
                where = int(plan.r_row[row]), int(plan.r_start[row]) + 1
                found[where] = plan.t_token[first + 1 : first + 1 + count].tolist()
        self._plans = []
        return found


def answer(served, asked, head=None, prefill=8):
    """What was said, and the drafts; the second request comes when the first has ended."""
    draft = None
    if head is not None:
        own = KVPool(slots=SLOTS, layouts=head.config.kv_layouts, dtype=torch.float32, device=CPU)
        draft = draft_of(head, served, own, MOST)
        assert isinstance(draft, EagleDraft)
    executor = Watching(
        HostExecutor(served, pool(SLOTS), rows=3, vocab_size=VOCABULARY, draft=draft)
    )
    guesses = None if head is None else partial(Drafting, ModelDrafts(), MOST)
    scheduler = Scheduler(Limits(SLOTS - 16, 2, POSITIONS, prefill), drafting=guesses)
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


def test_what_an_engine_drafts_is_what_the_definition_says(tmp_path, served):
    """In pieces of prompts, behind a prefix of the cache, behind wrong drafts, of sampled rows."""
    head = load_eagle(eagle_heads.save(tmp_path / "head"), served, positions=64, device=CPU)
    prompts = [PROMPT, [*PROMPT[:17], 7, 9, 11]]
    asked = [
        Request([1 + i], prompt, SamplingParams(), StoppingParams(9), drafts=MOST)
        for i, prompt in enumerate(prompts)
    ]
    link, drafted = answer(served, asked, head)
    plain, _ = answer(served, asked)
    assert link.tokens == plain.tokens
    assert link.cached > 10
    w, table = eagle_heads.tensors(), load_file(DEMO / "model.safetensors")
    table = table["model.embed_tokens.weight"].float()
    for i, prompt in enumerate(prompts):
        text = [*prompt, *link.tokens[1 + i]]
        streams = streams_of(served, text, head.taps)
        assert len(drafted[i]) >= 6
        for (_, known), drafts in drafted[i].items():
            tokens = torch.tensor(text[:known])
            one, two = eagle_heads.defined(w, table, tokens, streams[:known])
            assert drafts == [int(one[-1].argmax()), int(two.argmax())][: len(drafts)]


def streams_of(served, text, taps):
    """[n, 3 * hidden] of a text computed at once."""
    n = len(text)
    at = torch.arange(n)
    batch = ForwardBatch(
        t_token=torch.tensor(text),
        t_position=at,
        t_slot=at,
        b_start=[0, n],
        b_context=[n],
        b_runs=[[(0, n)]],
        b_row=[0],
        row_table=torch.zeros((0, 0), dtype=torch.int32),
        single_rows=0,
        logit_index=None,
    )
    return torch.cat(served.forward_tapped(batch, pool(n), taps)[1], dim=1)


def test_sampled_rows_say_the_same_with_a_head(tmp_path, served):
    head = load_eagle(eagle_heads.save(tmp_path / "head"), served, positions=64, device=CPU)
    # One of a single token, which has no entry.
    asked = [
        Request([1, 2], PROMPT, SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
        Request([3], [5], SAMPLED, StoppingParams(8), logprobs=True, drafts=MOST),
    ]
    got, _ = answer(served, asked, head)
    plain, _ = answer(served, asked)
    assert got.tokens == plain.tokens
    assert got.drafted[0] > 10


# -- on a device -------------------------------------------------------------------------------

SMALL = eagle_heads.Sizes(32, 4, 2, 24, 20, stepping.VOCABULARY, 64)


@pytest.mark.slow
def test_a_device_drafts_what_a_host_drafts(tmp_path):
    folder = step_scenes.save_model(tmp_path / "served", layers=3)
    head = eagle_heads.save(tmp_path / "head", sizes=SMALL)
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
        stepping.go_on(executor, rows, lambda row, outputs: [LAST] * [2, 1, 0][row])
        told.append(([row.outputs for row in rows], executor.drafts()))
        assert len(told[-1][1]) > 5
        assert all(LAST not in drafts for drafts in told[-1][1].values())
    assert told[0] == told[1]


def test_two_ranks_with_a_head_come_to_the_tokens_of_one(tmp_path):
    """The served model's embedding, which the head reads, is divided among them."""
    folder = step_scenes.save_model(tmp_path / "served", layers=3)
    head = eagle_heads.save(tmp_path / "head", sizes=SMALL)
    alone = step_scenes.Scene(
        step_scenes.make("fast", folder, CPU), [], step_scenes.table_of(folder)
    )
    plain = step_scenes.Told.by(step_scenes.plain(alone))
    ranks = step_scenes.run("cpu", folder, free_port(), [], ["found_drafts"], str(head))
    for told in ranks:
        assert told["found_drafts"].tokens == plain.tokens
