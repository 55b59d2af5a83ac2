"""What a plan's columns can say, on every executor: each scene comes to the tokens of plain steps.

The executors of a GPU are captured, and interpreted where there is none. Ranks are processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import step_scenes
import stepping
from harness import free_port
from interpreted import DEVICE
from ranks import CPU
from step_scenes import SCENES, Scene, Told

KINDS = ["compiled", "cpu", "device", pytest.param("reference", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return step_scenes.save_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def on_host(folder) -> Scene:
    return Scene(step_scenes.make("compiled", folder, CPU), [], step_scenes.table_of(folder))


@pytest.fixture(scope="module")
def expected(on_host) -> Told:
    return Told.by(step_scenes.plain(on_host))


@pytest.fixture(scope="module")
def adapted(on_host) -> Told:
    return Told.by(step_scenes.adapter(on_host))


@pytest.fixture(scope="module", params=KINDS)
def scene(request, folder, expected) -> Scene:
    executor = step_scenes.make(request.param, folder, DEVICE)
    tops = DEVICE.type == "cuda" or request.param in ("compiled", "cpu")
    return Scene(executor, expected.tokens, step_scenes.table_of(folder), tops)


@pytest.fixture(scope="module", params=["cpu", pytest.param("device", marks=pytest.mark.slow)])
def ranks(request, folder, expected) -> list[dict[str, Told]]:
    return step_scenes.run(request.param, folder, free_port(), expected.tokens)


def check(told: Told, expected: Told) -> None:
    assert told.tokens == expected.tokens
    assert told.tops in (expected.tops, [{}] * len(expected.tops))
    for got, wanted in zip(told.logprobs, expected.logprobs, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", SCENES)
def test_an_executor_comes_to_the_tokens_of_plain_steps(name, scene, expected, adapted):
    check(Told.by(SCENES[name](scene)), adapted if name == "adapter" else expected)


@pytest.mark.parametrize("name", SCENES)
def test_two_ranks_come_to_the_tokens_of_one(name, ranks, expected, adapted):
    leader, follower = ranks
    wanted = adapted if name == "adapter" else expected
    check(leader[name], wanted)
    assert follower[name].tokens == wanted.tokens


def test_rows_of_the_scenes_differ_and_go_on_for_a_while(expected):
    assert all(len(tokens) == stepping.NEW_TOKENS for tokens in expected.tokens)
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(expected.tokens)


def test_an_adapter_changes_its_row_alone(expected, adapted):
    for row, (tokens, changed) in enumerate(zip(expected.tokens, adapted.tokens, strict=True)):
        assert (tokens == changed) is (row != step_scenes.ADAPTED)
