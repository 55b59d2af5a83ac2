"""What a start measures is kept for starts under the same conditions, and for no others."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions, Placement
from tokenpod.engine.startup import conditions
from tokenpod.engine.startup.kept import MOST_CODE, Kept, Measured
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.scheduler.steps.machine_times import StepSize

MACHINE = "NVIDIA H200", 150_000_000_000, "driver 580.1"
MEASURED = Measured(
    step=5 << 30,
    taken=6 << 30,
    times=[(StepSize(8, 64), 0.004)],
    library={"6144 x 4096 bfloat16": [1, 63]},
)


@pytest.fixture
def options(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return EngineOptions(
        model_folder=str(folder),
        dtype=None,
        device="cuda",
        threads=0,
        max_batch_size=8,
        max_batch_prefill_tokens=100,
    )


@pytest.fixture
def kept(options, tmp_path):
    made = Kept(options, MACHINE, tmp_path)
    made.write(MEASURED)
    return made


def test_it_is_found_again(kept, options, tmp_path):
    assert kept.read() == MEASURED
    assert Kept(options, MACHINE, tmp_path).read() == MEASURED


@pytest.mark.parametrize("part", range(3), ids=["name", "memory", "driver"])
def test_another_machine_finds_nothing(kept, options, tmp_path, part):
    other = [*MACHINE]
    other[part] = "another"
    assert Kept(options, other, tmp_path).read() is None


def test_another_version_finds_nothing(kept, options, tmp_path, monkeypatch):
    monkeypatch.setattr(conditions, "version", lambda name: "0")
    assert Kept(options, MACHINE, tmp_path).read() is None


@pytest.mark.parametrize("changed", ["max_batch_size", "max_batch_prefill_tokens", "quantize"])
def test_other_options_find_nothing(kept, options, tmp_path, changed):
    value = "int4" if changed == "quantize" else 16
    other = msgspec.structs.replace(options, **{changed: value})
    assert Kept(other, MACHINE, tmp_path).read() is None


def test_another_model_finds_nothing(kept, options, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 64}')
    assert Kept(options, MACHINE, tmp_path).read() is None


def test_nothing_is_kept_of_a_model_without_a_folder(options, tmp_path):
    made = Kept(msgspec.structs.replace(options, model_folder=""), MACHINE, tmp_path)
    made.write(MEASURED)
    assert made.read() is None


def test_what_is_forgotten_or_broken_is_measured_anew(kept, tmp_path):
    (file,) = tmp_path.glob("*.steps")
    file.write_text('{"step": "five"}')
    assert kept.read() is None
    kept.forget()
    kept.forget()
    assert not list(tmp_path.glob("*.steps"))


def test_what_was_measured_while_others_took_memory_is_not_kept(options, tmp_path):
    made = Kept(options, MACHINE, tmp_path)
    made.write(Measured(5 << 30, (5 << 30) + MOST_CODE + 1, []))
    assert made.read() is None


def test_a_folder_that_cannot_be_written_keeps_nothing(options, tmp_path):
    (tmp_path / "file").write_text("")
    made = Kept(options, MACHINE, tmp_path / "file" / "cache")
    made.write(MEASURED)
    assert made.read() is None


def test_a_start_takes_what_is_kept(kept):
    assert kept.used(lambda measured: measured) == MEASURED


@pytest.mark.parametrize("error", [EngineError, torch.OutOfMemoryError])
def test_what_does_not_fit_is_measured_anew(kept, error):
    given = []

    def start(measured):
        given.append(measured)
        if measured is not None:
            raise error("no memory")
        return "started"

    assert kept.used(start) == "started"
    assert given == [MEASURED, None]
    assert kept.read() is None


def test_what_is_wrong_with_the_weights_is_no_question_of_memory(kept):
    def start(measured):
        raise ModelError("the file ends")

    with pytest.raises(ModelError):
        kept.used(start)
    assert kept.read() == MEASURED


class Others:
    """Other ranks, which have something kept, or do not."""

    def __init__(self, least):
        self.least = lambda number: min(number, least)


def test_ranks_take_what_all_of_them_have(kept):
    assert kept.used(lambda measured: measured, Others(1)) == MEASURED
    assert kept.used(lambda measured: measured, Others(0)) is None


def test_ranks_that_have_no_memory_start_again_and_measure(kept):
    def start(measured):
        raise EngineError("no memory")

    with pytest.raises(EngineError):
        kept.used(start, Others(1))
    assert kept.read() is None


def test_each_rank_has_its_own(kept, options, tmp_path):
    placement = Placement(0, 2, 0, "", "", 0, "", "", "")
    ranks = [msgspec.structs.replace(placement, rank=rank, secret=f"{rank}") for rank in (0, 0, 1)]
    made = [msgspec.structs.replace(options, placement=each) for each in ranks]
    first, again, second = (Kept(each, MACHINE, tmp_path) for each in made)
    first.write(MEASURED)
    assert (again.read(), second.read()) == (MEASURED, None)
