"""Virtual tokens before prompts: what an engine says is what transformers says with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.checkpoints.lora_folders import merge, write_lora
from support.checkpoints.virtual_folders import PREFIX, PROMPT, Expected, write_virtual
from support.engines.planner_probe import preempt_sequence
from support.engines.virtual_engine import CPU, Answer, Engine
from support.shared import Shared
from support.steps import step_scenes
from support.steps.stepping import VOCABULARY
from tokenpod.core.requests import Request
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models import load as loading

IDS = [(7 * i + i * i) % VOCABULARY for i in range(9)]
NEW = 4
NAMES = ("prompt", "other", "prefix", "lora")


@pytest.fixture(scope="module")
def base(shared: Shared) -> Path:
    return step_scenes.small_model(shared)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prompts, a prefix, and a LoRA adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    lora = write_lora(folder / "lora", base, {"model.layers.0.mlp.up_proj": 4})
    merge(base, lora, folder / "merged")
    return [
        write_virtual(folder / "prompt", base, PROMPT, 5),
        write_virtual(folder / "other", base, PROMPT, 10, seed=1),
        write_virtual(folder / "prefix", base, PREFIX, 6, seed=2),
        lora.folder,
    ]


@pytest.fixture(scope="module")
def wanted(base: Path, folders: list[Path]) -> Any:
    """(adapter, ids) -> tokens, and [ids + NEW - 1, vocabulary] log probabilities."""
    plain, merged = Expected(base), Expected(folders[0].parent / "merged")

    def tell(adapter: int, ids: list[int]) -> tuple[list[int], Any]:
        if adapter == 4:
            return merged.greedy(None, ids, NEW)
        return plain.greedy(folders[adapter - 1] if adapter else None, ids, NEW)

    return tell


def check(answer: Answer, wanted: Any, asked: Request) -> None:
    ids = asked.prompt
    tokens, scores = wanted(asked.adapter, ids)
    assert answer.tokens == tokens
    expected = [float(scores[len(ids) - 1 + at, token]) for at, token in enumerate(tokens)]
    assert answer.logprobs == pytest.approx(expected, abs=2e-5)


def on_device(model: Any, pool: KVPool, rows: int) -> Any:
    """The executor of GPUs, its kernels interpreted."""
    from tokenpod.engine.gpu import device_sampler
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.engine.gpu.device_sampler import SamplerTiles

    tiles = partial(SamplerTiles, split=64, groups=4, block=64, pivots=4)
    with patch.object(device_sampler, "SamplerTiles", tiles):
        sampler = device_sampler.device_sampler(
            None, rows=rows, vocab_size=VOCABULARY, device=CPU, most_edits=16
        )
    executor = DeviceExecutor(
        model,
        pool,
        sampler,
        rows=rows,
        max_positions=64,
        max_tokens=rows + 7,
        device=CPU,
        adapters=model.adapters,
    )
    executor.capture()
    return executor


def test_rows_of_all_kinds_share_steps_and_prompts_come_in_pieces(base, folders, wanted):
    """A step has 7 prompt tokens: virtual ones end within a step, and begin within one."""
    engine = Engine(base, folders, lora=1)
    for length in (9, 2, 1):
        asked = [engine.ask(adapter, IDS[:length], NEW) for adapter in (1, 2, 0, 3, 4)]
        for request, answer in zip(asked, engine.run(*asked), strict=True):
            check(answer, wanted, request)


def test_the_device_path_says_the_same(base, folders, wanted):
    chosen = step_scenes.operations("device", CPU)
    with patch.object(loading, "operations_for", lambda device: chosen):
        engine = Engine(base, folders[:3], rows=3, make=on_device)
    asked = [engine.ask(adapter, IDS[:4], NEW) for adapter in (1, 0, 3)]
    for request, answer in zip(asked, engine.run(*asked), strict=True):
        check(answer, wanted, request)


def test_prefixes_are_shared_within_one_adapter_and_its_tokens_are_not_counted(
    base, folders, wanted
):
    engine = Engine(base, folders[:3])

    def cached(adapter: int) -> int:
        asked = engine.ask(adapter, IDS, NEW)
        (answer,) = engine.run(asked)
        check(answer, wanted, asked)
        return answer.cached

    assert [cached(adapter) for adapter in (1, 2, 3, 0)] == [0, 0, 0, 0]
    assert [cached(adapter) for adapter in (1, 2, 3, 0)] == [8, 8, 8, 8]
    load = engine.scheduler.load()
    assert (load.prompt_tokens, load.cached_tokens) == (8 * len(IDS), 4 * 8)


def test_a_prefix_is_written_once_while_the_tree_has_it(base, folders, wanted):
    engine = Engine(base, folders[2:3], slots=60)
    filled = []
    fill = engine.executor._adapters.fill
    engine.executor._adapters.fill = lambda pool, slots, *which: (
        filled.append(len(slots)) or fill(pool, slots, *which)
    )

    def expect(adapter: int, ids: list[int]) -> None:
        asked = engine.ask(adapter, ids, NEW)
        (answer,) = engine.run(asked)
        assert answer.tokens == wanted(3 * adapter, ids)[0]

    expect(1, IDS)
    expect(1, IDS[::-1])
    assert filled == [6]
    # Others take its slots, from the end on.
    for start in range(5):
        expect(0, [(start * 9 + i) % VOCABULARY for i in range(40)])
    expect(1, IDS)
    assert sum(filled) > 6
    # Without a cache the ready tokens are still there for all.
    fresh = Engine(base, folders[2:3], prefix_caching=False)
    asked = [fresh.ask(1, IDS, NEW), fresh.ask(1, IDS, NEW)]
    assert [answer.tokens for answer in fresh.run(*asked)] == [wanted(3, IDS)[0]] * 2


def test_scores_of_a_prompt_are_of_its_own_tokens(base, folders, wanted):
    engine = Engine(base, folders[:3])
    asked = [engine.ask(adapter, IDS, NEW, prompt_logprobs=True) for adapter in (1, 2, 3, 0)]
    for request, answer in zip(asked, engine.run(*asked), strict=True):
        _, scores = wanted(request.adapter, IDS)
        expected = [float(scores[at, token]) for at, token in enumerate(IDS[1:])]
        assert answer.prompt_logprobs == pytest.approx(expected, abs=2e-5)


def test_a_preempted_sequence_begins_behind_its_virtual_tokens_again(base, folders, wanted):
    engine = Engine(base, folders[:3])
    asked = [engine.ask(adapter, IDS, NEW) for adapter in (1, 3)]
    for _ in range(4):
        engine.loop.turn()
        for request in asked:
            preempt_sequence(engine.scheduler, request.sequence_ids[0])
        engine.scheduler.check()
    for request, answer in zip(asked, engine.run(*asked), strict=True):
        check(answer, wanted, request)


def test_virtual_tokens_count_for_what_fits(base, folders):
    """Longest sequences have 64 positions."""
    engine = Engine(base, folders[:3])
    told: list[Any] = []
    engine.link.send = lambda message: told.extend(getattr(message, "failures", []))
    for adapter in (1, 3):
        engine.ask(adapter, IDS * 6, 6)
        engine.loop.turn()
    assert [failure.message for failure in told] == [
        "prompt and new tokens are 65; at most 64 are possible",
        "prompt and new tokens are 66; at most 64 are possible",
    ]


def test_eight_bits_hold_ready_keys_and_values(base, folders):
    """As multiples of their scales, to half of a last digit of e4m3."""
    engine = Engine(base, folders[2:3])
    store, scale = engine.executor._adapters, torch.full((1,), 0.25)
    layouts = engine.executor._model.config.kv_layouts
    pool = KVPool(
        layouts=layouts, slots=8, dtype=torch.float8_e4m3fn, device=CPU, scales=[(scale, scale)]
    )
    numbers = store._read[1].numbers
    store.fill(pool, *(torch.arange(n, n + 6).numpy().astype("int32") for n in (1,)), *_all(6))
    for at, found in enumerate((pool.keys[0], pool.values[0])):
        back = found[1:7].float() * 0.25
        torch.testing.assert_close(back, numbers[0, at], rtol=2**-4, atol=1e-3)


def _all(n: int) -> tuple[Any, Any]:
    """The first n virtual tokens of adapter 1."""
    which = torch.arange(n).numpy().astype("int32")
    return which * 0 + 1, which
