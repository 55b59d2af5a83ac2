"""What a plan's columns can say, on every executor: each scene comes to the tokens of plain steps.

The executors of a GPU are captured, and interpreted where there is none. Ranks are processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.kernels.interpreted import DEVICE
from support.pods.harness import free_port
from support.steps import step_scenes, stepping
from support.steps.ranks import CPU
from support.steps.step_scenes import SCENES, Scene, Told
from tokenpod.engine.steps.executor import Executor

pytestmark = pytest.mark.compute

#: Those that are run where kernels are interpreted, and take seconds there.
INTERPRETED_SCENES = ("found_drafts", "masks", "masks_alone")
#: Those that two ranks run on a device: others have all that these leave out.
DEVICE_RANKS_SCENES = tuple(name for name in SCENES if name not in ("plain", "drafts"))


def cases() -> Iterator[Any]:
    """Every executor with every scene."""
    for kind in ("fast", "cpu", "device", "reference"):
        for name in SCENES:
            marks: list[Any] = [pytest.mark.slow] if kind == "reference" else []
            if kind == "device" and name not in INTERPRETED_SCENES:
                marks = [pytest.mark.gpu]
            yield pytest.param(kind, name, marks=marks)


@pytest.fixture(scope="module")
def folder(shared) -> Path:
    return step_scenes.small_model(shared)


@pytest.fixture(scope="module")
def on_cpu(folder) -> Scene:
    return Scene(step_scenes.make("fast", folder, CPU), [], step_scenes.table_of(folder))


@pytest.fixture(scope="module")
def expected(on_cpu) -> Told:
    return Told.by(step_scenes.plain(on_cpu))


@pytest.fixture(scope="module")
def adapted(on_cpu) -> Told:
    return Told.by(step_scenes.adapter(on_cpu))


@pytest.fixture(scope="module")
def executors() -> dict[str, Executor]:
    """By kind: pytest would make one for each scene."""
    return {}


@pytest.fixture
def scene(request, folder, expected, executors) -> Scene:
    kind = request.param
    if kind not in executors:
        executors[kind] = step_scenes.make(kind, folder, DEVICE)
    tops = DEVICE.type == "cuda" or kind in ("fast", "cpu")
    return Scene(executors[kind], expected.tokens, step_scenes.table_of(folder), tops)


def rank_cases() -> Iterator[Any]:
    """Scenes of two ranks of hosts, and of devices."""
    for name in SCENES:
        yield pytest.param("cpu", name)
    for name in DEVICE_RANKS_SCENES:
        yield pytest.param("device", name, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def told_by_ranks() -> dict[str, list[dict[str, Told]]]:
    """By kind: pytest would run two ranks for each scene."""
    return {}


@pytest.fixture
def ranks(request, folder, expected, told_by_ranks) -> list[dict[str, Told]]:
    kind, names = request.param, tuple(SCENES)
    if kind not in told_by_ranks:
        names = names if kind == "cpu" else DEVICE_RANKS_SCENES
        told_by_ranks[kind] = step_scenes.run(kind, folder, free_port(), expected.tokens, names)
    return told_by_ranks[kind]


@pytest.fixture(scope="module")
def wanted(expected, adapted) -> dict[str, Told]:
    """What rows come to in each scene."""
    wanted = {**dict.fromkeys(SCENES, expected), "adapter": adapted}
    told = msgspec.structs.replace(expected, tokens=list(expected.tokens))
    told.logprobs = list(expected.logprobs)
    told.tops = [{} for _ in expected.tops]
    for row, tokens in step_scenes.FORCED.items():
        told.tokens[row] = expected.tokens[row][:1] + tokens[1 : stepping.NEW_TOKENS]
        told.logprobs[row] = expected.logprobs[row][:1] + [0.0] * (stepping.NEW_TOKENS - 1)
    wanted["masks"] = wanted["masks_alone"] = told
    return wanted


def check(name: str, told: Told, wanted: Told) -> None:
    assert told.tokens == wanted.tokens
    # Of masked rows, top tokens are those that the mask leaves; not every executor is asked.
    assert name.startswith("masks") or told.tops in (wanted.tops, [{}] * len(wanted.tops))
    for got, logprobs in zip(told.logprobs, wanted.logprobs, strict=True):
        assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(("scene", "name"), cases(), indirect=["scene"])
def test_an_executor_comes_to_the_tokens_of_plain_steps(name, scene, wanted):
    check(name, Told.by(SCENES[name](scene)), wanted[name])


@pytest.mark.parametrize(("ranks", "name"), [*rank_cases()], indirect=["ranks"])
@pytest.mark.pod
def test_two_ranks_come_to_the_tokens_of_one(name, ranks, wanted):
    leader, follower = ranks
    check(name, leader[name], wanted[name])
    assert follower[name].tokens == wanted[name].tokens


def test_rows_of_the_scenes_differ_and_go_on_for_a_while(expected):
    assert all(len(tokens) == stepping.NEW_TOKENS for tokens in expected.tokens)
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(expected.tokens)


def test_an_adapter_changes_its_row_alone(expected, adapted):
    for row, (tokens, changed) in enumerate(zip(expected.tokens, adapted.tokens, strict=True)):
        assert (tokens == changed) is (row != step_scenes.ADAPTED)
