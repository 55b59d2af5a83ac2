"""Processors of ours say what transformers' do, which want torchvision.

What those made of the same images (transformers 5.23, torchvision 0.28) is recorded: shapes and
integers, and the mean of each tile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.images.files import picture
from tokenpod.core.image_processors import _OWN, _look_up
from tokenpod.core.images import RowCount

RECORDED = json.loads(Path(__file__).with_name("torchvision_processors.json").read_text())
#: Of 255 colours, in units of the smallest deviation: Pillow and torchvision round otherwise.
ROUNDING = 2 / 255 / 0.26


@pytest.mark.parametrize("name", RECORDED)
def test_tensors_are_those_that_torchvision_makes(name: str) -> None:
    process = _OWN[RowCount(name)]
    for settings, images in RECORDED[name]:
        for (width, height), truth in images:
            made = process(settings, np.asarray(picture(width, height, width)))
            assert summary(made) == {
                **truth,
                "means": pytest.approx(truth["means"], abs=ROUNDING / 2),
            }, (settings, width, height)


@pytest.mark.parametrize("kind", ["Qwen2VL", "LlavaNext", "Idefics3"])
def test_colours_that_are_looked_up_are_those_that_are_computed(kind: str) -> None:
    import importlib

    folder = {"Qwen2VL": "qwen2_vl", "LlavaNext": "llava_next", "Idefics3": "idefics3"}[kind]
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    made = []
    for looks_up in (False, True):
        process = getattr(module, f"{kind}ImageProcessorPil")()
        if looks_up:
            _look_up(process)
        image = np.asarray(picture(90, 61, 5))
        made.append(process(image, input_data_format="channels_last", return_tensors="np"))
    computed, found = (each["pixel_values"] for each in made)
    assert found.dtype == computed.dtype
    assert np.array_equal(found, computed)


def summary(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is recorded of an image."""
    pixels = tensors["pixel_values"]
    integers = {name: each.tolist() for name, each in tensors.items() if each.dtype.kind == "i"}
    mask = integers.pop("pixel_attention_mask", None)
    if mask is not None:
        integers["patches"] = [sum(row) for row in mask]
    integers.pop("num_soft_tokens_per_image", None)
    tiles = pixels if len(pixels) < 20 else pixels[None]
    means = [round(float(tile.mean()), 3) for tile in tiles]
    return {"shape": [*pixels.shape], **integers, "means": means}
