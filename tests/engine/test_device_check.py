"""What can't be served on a GPU is refused in one line that names the numbers."""

from __future__ import annotations

import pytest
import torch

from tokenpod.core.capability import problem_of
from tokenpod.core.step_limits import StepLimits
from tokenpod.engine.startup.assemble import EngineError
from tokenpod.engine.startup.device_check import (
    MOST_IN_Y,
    check_device,
    check_heads,
    check_latent,
    check_step,
)
from tokenpod.kernels.sampling.offers import offer


def test_a_cpu_will_do():
    check_device(torch.device("cpu"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_ampere_and_newer_will_do(capability):
    assert problem_of("a GPU", capability) is None


def test_an_old_gpu_is_named():
    problem = problem_of("Tesla T4", (7, 5))
    assert problem is not None
    assert all(word in problem for word in ("Tesla T4", "7.5", "8.0", "--device cpu"))


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 1, 256), (32, 4, 512), (71, 1, 64), (12, 12, 80)]
)
def test_heads_that_kernels_handle_pass(heads):
    check_heads(*heads)


@pytest.mark.parametrize(
    ("heads", "named"), [((8, 8, 520), "520 features"), ((129, 1, 64), "129 query heads")]
)
def test_heads_that_they_do_not_are_named(heads, named):
    with pytest.raises(EngineError, match=named):
        check_heads(*heads)


def test_latent_rows_that_they_do_not_handle_are_named():
    check_latent(512, 64)
    with pytest.raises(EngineError, match=r"latent rows have 1024 \+ 64 numbers"):
        check_latent(1024, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("cuda", "named"), [(None, "is built without CUDA"), ("13.0", "finds no usable NVIDIA GPU")]
)
def test_a_gpu_that_is_not_there_is_named_with_either_build_of_torch(monkeypatch, cuda, named):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(EngineError, match=f"device is cuda, but .*{named}"):
        check_device(torch.device("cuda"))


@pytest.mark.gpu
def test_a_gpu_too_many_is_named():
    count = torch.cuda.device_count()
    check_device(torch.device("cuda", count - 1))
    with pytest.raises(EngineError, match=f"shows {count} GPU"):
        check_device(torch.device("cuda", count))


def test_a_step_of_more_tokens_than_a_grid_has_places_for_is_named():
    check_step(StepLimits(rows=513, prompt=MOST_IN_Y - 513 - 256, drafts=256))
    with pytest.raises(EngineError, match=r"65,536 tokens: 64,767 of prompts \(--max-batch-pref"):
        check_step(StepLimits(rows=513, prompt=MOST_IN_Y - 512 - 256, drafts=256))


@pytest.mark.gpu
def test_a_gpu_takes_no_more_rows_along_y_than_that():
    device = torch.device("cuda")
    for rows in (MOST_IN_Y, MOST_IN_Y + 1):
        index = torch.zeros(rows, dtype=torch.int64, device=device)
        given = torch.zeros(1, 97, device=device), index, index[:1], index, index[:1], index
        if rows == MOST_IN_Y:
            assert len(offer(*given)) == rows
        else:
            with pytest.raises(RuntimeError):
                offer(*given)
