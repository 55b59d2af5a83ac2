"""A model of latent rows through the whole engine: prefixes, chunks, copies, preemption."""

from __future__ import annotations

import msgspec
import pytest
import torch

from support.kernels.live_tensors import LiveTensors
from support.steps import ranks
from tokenpod.core.messages import EngineOptions
from tokenpod.core.model_size import EXPANDED_AT_ONCE
from tokenpod.core.new_row import NewRow
from tokenpod.core.plan import PlanRow, plan_of
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.engine.startup.assemble import EngineError, assemble, make_pool
from tokenpod.engine.steps.first_steps import worst_step

#: Rows and chunks are few, so that sequences wait, prompts are cut up and steps are mixed.
OPTIONS = EngineOptions(
    model_folder="",
    dtype=None,
    device="cpu",
    threads=1,
    max_batch_size=3,
    max_batch_prefill_tokens=24,
    max_total_tokens=80,
)


def requests(new_tokens: int) -> list[Request]:
    """The second shares most of its prompt with the first; the third has two samples."""
    prompt = [(11 * i) % 96 for i in range(37)]
    ends = StoppingParams(max_new_tokens=new_tokens)
    return [
        Request([1], prompt, SamplingParams(), ends, logprobs=True, prompt_logprobs=True),
        Request([2], [*prompt[:30], 5, 6], SamplingParams(), ends, logprobs=True),
        Request([3, 4], prompt[:20], SamplingParams(), ends, logprobs=True),
    ]


def check(said, reference, asked) -> None:
    assert said.failures == []
    for request in asked:
        for sequence in request.sequence_ids:
            tokens = said.tokens[sequence]
            logprobs = reference.logprobs([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
            assert tokens == logprobs.argmax(-1).tolist()
            chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert said.logprobs[sequence] == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("preempt", [0.0, 0.2])
def test_on_a_cpu(preempt, golden):
    reference, asked = golden("deepseek-v3"), requests(9)
    check(ranks.answer(reference.folder, asked, OPTIONS, preempt=preempt), reference, asked)


def test_the_largest_step_at_the_start_is_that_of_a_long_context(golden, load_folder, monkeypatch):
    """No piece of a long prompt takes more memory than what was run before any request."""
    monkeypatch.setitem(EXPANDED_AT_ONCE, "cpu", 600)
    model, rows, prompt, positions = load_folder(golden("kimi-k2-stacked").folder), 3, 16, 200
    pool = make_pool(model, 300, torch.device("cpu"))
    executor = CpuExecutor(model, pool, rows=rows, vocab_size=model.config.vocab_size)

    def most_bytes(step):
        with LiveTensors() as live:
            executor.launch(step).wait()
        executor.release(range(rows))
        return live.most_bytes

    def worst(context):
        return worst_step(rows, prompt, positions, scattered=False, context=context)

    tokens = list(range(90))
    asked = Request([0], tokens * 2, SamplingParams(), StoppingParams(max_new_tokens=1))
    late = [
        PlanRow(0, at, range(at, at + 16), tokens[:16], new=NewRow(asked, 0), prefix=range(at))
        for at in (40, 100, 180)
    ]
    needed = [most_bytes(plan_of(0, [row])) for row in late]
    assert worst(positions).r_start.tolist() == [0, 0, positions - prompt]
    assert max(needed) <= most_bytes(worst(positions))
    assert max(needed) > most_bytes(worst(0))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_cache_of_8_bits_is_refused(kv_cache_dtype, golden, load_folder, monkeypatch):
    monkeypatch.setattr(
        "tokenpod.engine.startup.assemble.eight_bits_problem", lambda name, gpu: None
    )
    model = load_folder(golden("deepseek-v3").folder)
    options = msgspec.structs.replace(OPTIONS, kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(EngineError, match="DeepseekV3ForCausalLM has latent rows"):
        assemble(model, options, positions=80, device=torch.device("cpu"))
