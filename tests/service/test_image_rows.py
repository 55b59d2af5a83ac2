"""What stands for an image in a prompt is what transformers' processors of wholes write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from support.images.files import picture
from tokenpod.core.images import SIGHTS
from tokenpod.service.images.expansions import rows_of
from tokenpod.service.images.image_rows import layout_of
from tokenpod.service.images.image_text import ImageTokens

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_FINER = [[384 * high, 384 * wide] for high in range(1, 7) for wide in range(1, 7)]
_FAKE = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
_GRID = {"image_token": "<image>", "image_processor": SimpleNamespace(merge_size=2)}
#: By architecture, less its end: fields of its config, the processor of images, what transformers'
#: processor of the whole takes from files and the tokenizer.
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "AyaVision": (
        {"vision_config": {"image_size": 364, "patch_size": 14}, "downsample_factor": 2},
        lambda: transformers.GotOcr2ImageProcessorPil(
            size={"height": 364, "width": 364}, max_patches=6, min_patches=1
        ),
        {
            **{"img_size": 364, "patch_size": 28, "img_patch_token": "<image>"},
            **{"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"},
            **{"tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"},
        },
    ),
    "Idefics3": (
        {"vision_config": {"image_size": 364, "patch_size": 14}, "scale_factor": 2},
        lambda: transformers.Idefics3ImageProcessorPil(size={"longest_edge": 728}),
        {**_FAKE, "global_image_tag": "<global-img>", "image_seq_len": 169},
    ),
    "InternVL": (
        {},
        lambda: transformers.GotOcr2ImageProcessorPil(
            size={"height": 448, "width": 448}, max_patches=6, min_patches=1
        ),
        {
            **{"start_image_token": "<img>", "end_image_token": "</img>"},
            **{"image_token": "<image>", "image_seq_length": 256},
        },
    ),
    "Llava": (
        {},
        lambda: transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        ),
        {
            **{"patch_size": 14, "num_additional_image_tokens": 1},
            **{"vision_feature_select_strategy": "default", "image_token": "<image>"},
        },
    ),
    "LlavaNext": (
        {"image_grid_pinpoints": _PINPOINTS},
        lambda: transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 336},
            crop_size={"height": 336, "width": 336},
            image_grid_pinpoints=_PINPOINTS,
        ),
        {
            **{"patch_size": 14, "num_additional_image_tokens": 1, "image_token": "<image>"},
            "vision_feature_select_strategy": "default",
            "image_processor": SimpleNamespace(image_grid_pinpoints=_PINPOINTS),
        },
    ),
    "LlavaOnevision": (
        {"image_grid_pinpoints": _FINER},
        lambda: transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 384, "width": 384}, image_grid_pinpoints=_FINER
        ),
        {
            **{"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"},
            **{"vision_feature_select_strategy": "full", "image_token": "<image>"},
            "image_processor": SimpleNamespace(image_grid_pinpoints=_FINER),
        },
    ),
    "SmolVLM": (
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        lambda: transformers.SmolVLMImageProcessorPil(
            size={"longest_edge": 1024}, max_image_size={"longest_edge": 512}
        ),
        {**_FAKE, "global_image_token": "<global-img>", "image_seq_len": 64},
    ),
    "Qwen2VL": ({}, transformers.Qwen2VLImageProcessorPil, _GRID),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_stands_for_an_image_is_what_transformers_writes(kind: str) -> None:
    fields, process, attributes = CASES[kind]
    sight = SIGHTS[f"{kind}ForConditionalGeneration"]
    config = getattr(transformers, f"{kind}Config")(**fields)
    whole = getattr(transformers, f"{kind}Processor")
    # What it is made of otherwise is a tokenizer, of which it asks these.
    whole = whole.__new__(whole)
    vars(whole).update(attributes)
    tokens = ImageTokens(0, "<image>")
    counts = set()
    for size in (500, 375), (90, 700), (40, 40):
        pixels = np.asarray(picture(*size))
        made = process()(pixels, input_data_format="channels_last", **sight.options)
        tensors = {name: np.asarray(value) for name, value in made.items()}
        found = layout_of(sight.rows, config, tensors, {})
        assert tokens.expansion(found) == whole.replace_image_token(made, 0)
        counts.add(rows_of(found))
    assert len(counts) > 1 or kind == "Llava"


def test_lines_of_pixtral_end_with_tokens() -> None:
    """transformers' class for it can't be imported without torchvision."""
    sight, config = SIGHTS["Mistral3ForConditionalGeneration"], transformers.Mistral3Config()
    process = transformers.PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=28)
    made = process(np.asarray(picture(100, 70)), input_data_format="channels_last")
    tensors = {name: np.asarray(value) for name, value in made.items()}
    names = {"image_break_token": "<br>"}
    assert layout_of(sight.rows, config, tensors, names) == (
        *(("", 4), ("<br>", 4), ("<br>", 4), ("[IMG_END]", 0)),
    )
