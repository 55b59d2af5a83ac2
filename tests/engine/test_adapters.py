"""Steps with adapters on the executors: a captured step reads what lies in the slots now."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.checkpoints.lora_folders import write_lora
from support.shared import Shared
from support.steps import step_scenes
from support.steps.stepping import VOCABULARY
from tokenpod.core.messages import LoadAdapter
from tokenpod.core.new_row import NewRow
from tokenpod.core.outputs import FailureCode
from tokenpod.core.plan import PlanRow, plan_of
from tokenpod.core.rank_reads import RankRead
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.adapters.adapters import Adapters
from tokenpod.engine.cpu.cpu_executor import CpuExecutor
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models import load as loading
from tokenpod.models.adapters.store import Space
from tokenpod.scheduler.sequences.adapter_slots import AdapterSlots

pytestmark = pytest.mark.compute

CPU = torch.device("cpu")
ROOM = 16
PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def base(shared: Shared) -> Path:
    return step_scenes.small_model(shared)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = {f"model.layers.0.{part}": 4 for part in PARTS}
    tables = "model.embed_tokens", "lm_head"
    ranks = {"rank_pattern": {"x": 2, "y": 3}}
    kinds: tuple[dict[str, Any], ...] = (
        {"whole": tables},
        {"modules": modules | dict(zip(tables, (2, 3), strict=True)), "embedding": tables[0]},
        {"use_dora": True},
    )
    return [
        write_lora(folder / str(n), base, **{"modules": modules} | kind | ranks, seed=n).folder
        for n, kind in enumerate(kinds)
    ]


def executor_of(kind: str, base: Path, adapters: list[Path]):
    chosen = step_scenes.operations("fast" if kind == "host" else "device", CPU)
    with patch.object(loading, "operations_for", lambda device: chosen):
        model = loading.load_model(
            base,
            dtype=None,
            device=CPU,
            progress=lambda done, total: None,
            max_total_tokens=ROOM,
            adapters=Space(slots=2, rank=4, heads=2, vocabulary=True),
        )
    store = model.adapters
    for number, folder in enumerate(adapters, start=1):
        store.keep(number, store.read(folder))
    layouts = model.config.kv_layouts
    pool = KVPool(slots=4 * ROOM, layouts=layouts, dtype=model.dtype, device=CPU)
    if kind == "host":
        return CpuExecutor(model, pool, rows=4, vocab_size=VOCABULARY, group=None, adapters=store)
    from tokenpod.engine.gpu import device_sampler
    from tokenpod.engine.gpu.device_executor import DeviceExecutor
    from tokenpod.engine.gpu.device_sampler import SamplerTiles
    from tokenpod.kernels.adapters import triton_adapters
    from tokenpod.kernels.adapters.triton_adapters import AdapterTiles

    tiles = partial(SamplerTiles, split=64, groups=4, block=64, pivots=4)
    with patch.object(device_sampler, "SamplerTiles", tiles):
        sampler = device_sampler.device_sampler(
            None, rows=4, vocab_size=VOCABULARY, device=CPU, most_edits=16
        )
    executor = DeviceExecutor(
        model,
        pool,
        sampler,
        rows=4,
        max_positions=ROOM,
        max_tokens=20,
        device=CPU,
        adapted=True,
        adapters=store,
    )
    # Interpreted, each program takes its time.
    few = ((1 << 31, AdapterTiles(16, 64, 1, 4, 64, 4)),)
    with patch.object(triton_adapters, "TILES", few):
        executor.capture()
    return executor


def said(executor) -> list[list[int]]:
    """Two rows with an adapter each and one without; then one whose adapter takes a slot."""
    asked = Request([0], [], SamplingParams(), StoppingParams(max_new_tokens=9), logprobs=True)
    prompts = {row: [(7 * i + row) % VOCABULARY for i in range(4)] for row in range(4)}
    slots = {0: 1, 1: 0, 2: 2, 3: 1}
    found: dict[int, list[int]] = {row: [] for row in range(4)}

    def row(number: int, tokens: list[int] | None) -> PlanRow:
        start = len(prompts[number]) + len(found[number]) - 1 if tokens is None else 0
        count = 1 if tokens is None else len(tokens)
        place = range(number * ROOM + start, number * ROOM + start + count)
        new = None if tokens is None else NewRow(asked, stream=0)
        output, adapter = len(found[number]), slots[number]
        return PlanRow(number, start, place, tokens, output=output, new=new, adapter=adapter)

    def step(rows: list[PlanRow], **more) -> None:
        result = executor.launch(plan_of(1, rows, **more)).wait()
        for each, token in zip(rows, result.tokens, strict=True):
            found[each.row].append(token)

    step([row(n, prompts[n]) for n in range(3)], puts=[(1, 1), (2, 2)])
    for _ in range(3):
        step([row(n, None) for n in range(3)])
    # Decoding rows, none of which has an adapter, then one that the next step's takes over.
    step([row(1, None)])
    step([row(1, None), row(2, None), row(3, prompts[3])], freed=[0], puts=[(1, 3)])
    for _ in range(2):
        step([row(n, None) for n in (1, 2, 3)])
    return [found[n] for n in range(4)]


@pytest.fixture(scope="module")
def device(base: Path, adapters: list[Path]):
    return executor_of("device", base, adapters)


@pytest.mark.slow
def test_a_device_says_what_the_host_says(device, base: Path, adapters: list[Path]) -> None:
    expected = said(executor_of("host", base, adapters))
    assert said(device) == expected
    swapped = said(executor_of("host", base, [adapters[1], adapters[0], adapters[2]]))
    assert swapped[1] == expected[1]
    assert swapped[0] != expected[0]
    assert swapped[3] == expected[3]


def test_steps_without_an_adapter_launch_nothing_for_them(base: Path, adapters: list[Path]) -> None:
    executor = executor_of("device", base, adapters)
    store = executor._model.adapters
    asked = Request([0], [1, 2], SamplingParams(), StoppingParams(max_new_tokens=9))
    calls = []
    with patch.object(store, "prepared", lambda batch: calls.append(batch.t_adapter) or batch):
        first = PlanRow(0, 0, [0, 1], [1, 2], new=NewRow(asked, stream=0))
        executor.launch(plan_of(1, [first])).wait()
        assert calls == [None]
        executor.launch(plan_of(2, [PlanRow(0, 2, [2], output=1, adapter=1)])).wait()
    assert len(calls[1]) >= 1


def test_who_reads_rests_between_modules(base, adapters) -> None:
    store = executor_of("host", base, [])._adapters
    rests = []
    read = store.read(adapters[1], lambda: rests.append(len(rests)))
    # After its tensors are read, and after they are put together.
    assert len(rests) >= 2 * len(PARTS)
    assert all(map(torch.equal, read.pieces, store.read(adapters[1]).pieces))


# -- the leader's book -------------------------------------------------------------------------


class OtherRanks:
    """Followers that answer what a test says."""

    count = 1

    def __init__(self) -> None:
        self.reads: SimpleQueue[RankRead] = SimpleQueue()
        self.asked: list[str] = []

    def read_adapter(self, number: int, name: str, path: str) -> None:
        self.asked.append(f"read {number} {path}")

    def drop_adapter(self, number: int) -> None:
        self.asked.append(f"drop {number}")


@pytest.fixture
def book(base: Path, adapters: list[Path]):
    store = executor_of("host", base, [])._adapters
    others, slots, told = OtherRanks(), AdapterSlots(2), []
    made = Adapters(
        store,
        slots,
        [],
        root=str(adapters[0].parent),
        most=2,
        send=told.append,
        followers=others,
    )
    return made, others, slots, told


def settle(book: Adapters, told: list, count: int) -> None:
    """Until so much has been told: a thread reads."""
    deadline = time.monotonic() + 30
    while len(told) < count:
        assert time.monotonic() < deadline
        book.settle()
        time.sleep(0.01)


def test_a_name_points_to_an_adapter_once_all_ranks_have_it(book) -> None:
    adapters, others, slots, told = book
    adapters.load(LoadAdapter(7, "one", "0"))
    while adapters._loading[1].left > 1:
        adapters.settle()
    assert told == []
    assert not slots.knows(1)
    digest = next(iter(adapters._loading[1].digests))
    others.reads.put(RankRead(1, 1, digest))
    settle(adapters, told, 2)
    listed, done = told
    assert [each.name for each in listed.loaded] == ["one"]
    assert (done.op, done.facts.number, done.facts.digest) == (7, 1, digest)
    assert slots.knows(1)
    assert others.asked == ["read 1 0"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RankRead(1, 1, "f" * 64), "adapter one: ranks read different files: their digests begin"),
        (RankRead(1, 1, problem="no such file"), "adapter one: rank 1: no such file"),
    ],
)
def test_what_one_rank_lacks_is_loaded_by_none(book, answer: RankRead, said: str) -> None:
    adapters, others, slots, told = book
    adapters.load(LoadAdapter(7, "one", "0"))
    others.reads.put(answer)
    settle(adapters, told, 1)
    (done,) = told
    assert (done.op, done.facts, done.failure) == (7, None, FailureCode.INVALID_ARGUMENT)
    assert done.message.startswith(said)
    assert not slots.knows(1)
    assert others.asked[-1] == "drop 1"
    assert not adapters.busy


def test_one_name_is_loaded_at_a_time(book) -> None:
    adapters, _, _, told = book
    adapters.load(LoadAdapter(1, "one", "0"))
    adapters.load(LoadAdapter(2, "one", "1"))
    (done,) = told
    assert (done.op, done.failure) == (2, FailureCode.UNAVAILABLE)
    adapters.load(LoadAdapter(3, "two", "1"))
    adapters.load(LoadAdapter(4, "three", "2"))
    assert (told[1].op, told[1].failure) == (4, FailureCode.RESOURCE_EXHAUSTED)
