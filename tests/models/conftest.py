"""What tests of models share: kinds of checkpoints, random texts, a scheduler by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints.golden_kinds import KINDS, MAX_POSITIONS, VOCABULARY
from support.steps.hand_scheduler import HandScheduler
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.families import baichuan
from tokenpod.models.load import load_model


def load(folder: Path, dtype: torch.dtype | None = None) -> Decoder:
    return load_model(
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
    )


@pytest.fixture(scope="session", autouse=True)
def _small_baichuan():
    """Its second vocabulary, by which its head is known, would take most of the tests' time."""
    assert baichuan.SECOND_VOCABULARY == 125_696
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baichuan, "SECOND_VOCABULARY", VOCABULARY + 1)
        yield


@pytest.fixture
def text() -> Callable[..., list[int]]:
    """Random tokens: the same for the same seed."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    return make


@pytest.fixture(scope="session")
def load_folder() -> Callable[..., Decoder]:
    return load


@pytest.fixture(scope="session")
def schedule() -> type[HandScheduler]:
    return HandScheduler


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", [as_in_every_run(kind) for kind in KINDS])


def as_in_every_run(kind: str) -> Any:
    """A family's model of uneven settings is slow where the plain one is there as well."""
    varied = kind.endswith("-varied") and kind.removesuffix("-varied") in KINDS
    return pytest.param(kind, marks=pytest.mark.slow) if varied else kind
