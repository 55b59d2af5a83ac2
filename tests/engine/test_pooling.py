"""Vectors of texts are those of the published modules, whatever else a step holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.checkpoints.embedding_models import KINDS, LABELLED, VOCABULARY, EmbeddingGolden
from support.engines.engine_link import Client
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.core.outputs import FailureCode, FinishCode
from tokenpod.core.requests import PoolingParams, Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.core.task import Task
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup.assemble import assemble
from tokenpod.engine.steps.first_steps import run_worst_steps, worst_step
from tokenpod.kernels.attention import compiled_attention
from tokenpod.kernels.attention.compiled_attention import _decode
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.load import load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
#: Of texts in a step: those of decoders are cut, those of encoders are not.
LENGTHS = (1, 2, 7, 40, 3, 64, 33, 1, 12)
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known = {}

    def make(kind: str) -> EmbeddingGolden:
        if kind not in known:
            known[kind] = EmbeddingGolden(kind, tmp_path_factory.mktemp(kind))
        return known[kind]

    return make


class Engine:
    def __init__(self, folder, *, prefill=64, rows=6, task="auto"):
        self.model = load_model(
            folder, dtype=None, device=CPU, progress=lambda done, total: None, task=task
        )
        options = EngineOptions(
            model_folder="",
            dtype=None,
            device="cpu",
            threads=1,
            max_batch_size=rows,
            max_batch_prefill_tokens=prefill,
        )
        made = assemble(self.model, options, positions=64, device=CPU)
        self.executor = made.executor
        encodes = self.model.config.encodes
        limits = Limits(
            made.slots,
            rows,
            64,
            prefill,
            pools=self.model.pooling is not None,
            whole_prompts=encodes,
        )
        self.scheduler = Scheduler(limits)

    def answer(self, requests, abort=()):
        client = Client(requests)
        loop = EngineLoop(client, self.scheduler, self.executor)
        while client.left:
            loop.turn()
            self.scheduler.abort(abort)
            client.left -= {*abort}
        loop.turn()
        assert not self.scheduler.busy
        self.scheduler.check()
        load = self.scheduler.load()
        assert load.free_slots == load.slots, "something of a text was kept"
        return client


def texts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def asked(prompts, **pooling):
    return [
        Request(
            [i],
            prompt,
            SamplingParams(),
            StoppingParams(max_new_tokens=1),
            pooling=PoolingParams(**pooling),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_modules(made, kind):
    golden = made(kind)
    engine = Engine(golden.folder, prefill=64 if "qwen" not in kind else 16)
    prompts = texts()
    client = engine.answer(asked(prompts))
    assert set(client.finishes.values()) == {FinishCode.EOS}
    for i, prompt in enumerate(prompts):
        expected = golden.vector(prompt)
        got = torch.from_numpy(client.vectors[i].copy())
        assert got.shape == (1, golden.width)
        torch.testing.assert_close(got[0], expected, **CLOSE)


def test_no_text_waits_for_a_loop(made, monkeypatch):
    """Not even one of a token, which decoders read by another loop: compiling takes seconds."""
    # Loops are compiled for heads of this size, too.
    monkeypatch.setattr(compiled_attention, "_is_worth_compiling", lambda numbers: True)
    _decode.cache_clear()
    engine = Engine(made("qwen3").folder)
    known = _decode.cache_info().misses
    assert known > 0
    engine.answer(asked([[5], [5, 6, 7]]))
    assert _decode.cache_info().misses == known


@pytest.mark.parametrize("kind", ["minilm", "qwen3"])
def test_vectors_of_tokens_are_the_states(made, kind):
    golden = made(kind)
    prompts = texts()
    client = Engine(golden.folder, prefill=64).answer(asked(prompts, tokens=True))
    for i, prompt in enumerate(prompts):
        expected = torch.nn.functional.normalize(golden.states(prompt))
        torch.testing.assert_close(torch.from_numpy(client.vectors[i].copy()), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["e5", "qwen3-mean"])
def test_tokens_of_an_instruction_can_be_left_out(made, kind):
    golden = made(kind)
    prompts = texts((9, 40))
    client = Engine(golden.folder, prefill=64 if kind == "e5" else 7).answer(
        asked(prompts, left_out=5)
    )
    for i, prompt in enumerate(prompts):
        expected = golden.vector(prompt, left_out=5)
        torch.testing.assert_close(torch.from_numpy(client.vectors[i][0].copy()), expected, **CLOSE)


@pytest.mark.parametrize("kind", LABELLED)
def test_heads_of_labels_say_what_transformers_says(made, kind):
    golden = made(kind)
    engine = Engine(golden.folder)
    labels = golden.kind.settings["num_labels"]
    assert engine.model.pooling.spec.task is (Task.CLASSIFY if labels > 1 else Task.SCORE)
    prompts = texts()
    client = engine.answer(asked(prompts))
    for i, prompt in enumerate(prompts):
        expected = golden.logits(prompt)
        assert client.vectors[i].shape == (1, labels)
        torch.testing.assert_close(torch.from_numpy(client.vectors[i][0].copy()), expected, **CLOSE)


def test_tokens_of_a_second_text_are_told_apart(made):
    golden = made("ms-marco")
    engine = Engine(golden.folder)
    second = engine.model.config.second_text
    (prompt,) = texts((20,))
    pair = prompt[:8] + [token + second for token in prompt[8:]]
    client = engine.answer(asked([pair]))
    got = torch.from_numpy(client.vectors[0][0].copy())
    torch.testing.assert_close(got, golden.logits(prompt, second=8), **CLOSE)
    assert not torch.allclose(got, golden.logits(prompt), **CLOSE)


def test_a_text_that_fits_no_step_is_refused(made):
    engine = Engine(made("minilm").folder, prefill=16)
    client = engine.answer(asked(texts((17, 16))))
    assert client.codes == {0: FailureCode.INVALID_ARGUMENT}
    assert "17 tokens; a step reads 16" in client.failures[0]
    assert 1 in client.vectors


def test_a_model_that_makes_vectors_writes_no_text(made):
    engine = Engine(made("qwen3").folder)
    request = Request([0], [5, 6], SamplingParams(), StoppingParams(max_new_tokens=4))
    client = engine.answer([request])
    assert "text is asked for; this model makes vectors" in client.failures[0]


def test_those_that_are_given_up_leave_nothing_behind(made):
    golden = made("qwen3-mean")
    engine = Engine(golden.folder, prefill=8, rows=2)
    prompts = texts()
    client = engine.answer(asked(prompts), abort=[3, 5])
    for i in {*range(len(prompts))} - {3, 5}:
        torch.testing.assert_close(
            torch.from_numpy(client.vectors[i][0].copy()), golden.vector(prompts[i]), **CLOSE
        )


def test_no_numbers_end_their_own_text_alone(made):
    golden = made("minilm")
    engine = Engine(golden.folder)
    engine.model._table[7] = float("nan")
    prompts = texts((5, 6))
    prompts[0] = [7, 8, 9]
    prompts[1] = [token for token in prompts[1] if token != 7]
    client = engine.answer(asked(prompts))
    assert client.codes == {0: FailureCode.DATA_LOSS}
    assert np.isfinite(client.vectors[1]).all()


def test_a_model_whose_vectors_are_no_numbers_does_not_start(made, monkeypatch):
    monkeypatch.setattr(Decoder, "forward", lambda self, batch, pool: torch.full((64, 32), np.nan))
    with pytest.raises(EngineError, match="computes NaN or Inf of a prompt of 64 tokens"):
        Engine(made("minilm").folder)


def test_steps_before_the_first_text_draw_nothing(made):
    plan = worst_step(6, 64, 64, scattered=False, pools=True)
    assert (plan.tokens, plan.sampling, len(plan.scored_token)) == (5 + 63, 0, 0)
    engine = Engine(made("minilm").folder)
    found = engine.executor.launch(plan).wait()
    assert [sum(part.counts) for part in found.pooled] == [plan.tokens]
    engine.executor.release(range(6))
    run_worst_steps(engine.executor, 6, 64, 64, pools=True)
