"""What stands for an image in a prompt: how many rows of embeddings, and texts between them.

transformers' processors of wholes (`replace_image_token`) say it for each architecture; tests
compare. They can't be used themselves: they want the tokenizer, and some torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tokenpod.core.images import RowCount
from tokenpod.service.images.expansions import Layout

Tensors = Mapping[str, npt.NDArray[Any]]


def layout_of(rows: RowCount, config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    """How one image stands in a prompt.

    Args:
        rows: the rule.
        config: transformers' of the whole model.
        tensors: what the model's processor of images made of it.
        names: processor_config.json, which may name the tokens between rows.
    """
    return (*_RULES[rows](config, tensors, names),)


def _rows(count: float | np.integer[Any]) -> Layout:
    return (("", int(count)),)


def _grid(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del names
    merge = int(config.vision_config.spatial_merge_size)
    return _rows(tensors["image_grid_thw"].prod() // merge**2)


def _patches(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del names
    vision = config.vision_config
    height, width = tensors["pixel_values"].shape[-2:]
    return _rows((height // vision.patch_size) * (width // vision.patch_size) + _classes(config))


def _classes(config: Any) -> int:
    """1, or 0, or -1: of rows more than patches. CLIP's towers have a class token, which "default"
    leaves out.
    """
    classes = config.vision_config.model_type == "clip_vision_model"
    # PaliGemma's config has no such field.
    strategy = getattr(config, "vision_feature_select_strategy", "full")
    return int(classes) - int(strategy == "default")


def _tiles(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del names
    count = int(tensors["num_patches"].reshape(-1)[0])
    return ("<img>", _per_tile(config.vision_config, config.downsample_ratio) * count), (
        "</img>",
        0,
    )


def _per_tile(vision: Any, ratio: float) -> int:
    """Rows of a square that is scaled by a ratio."""
    size, patch = (int(np.ravel(x)[0]) for x in (vision.image_size, vision.patch_size))
    side = int(size / patch * ratio)
    return side * side


def _named_tiles(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Iterator[Any]:
    each = _per_tile(config.vision_config, 1 / config.downsample_factor)
    yield names.get("start_of_img_token", "<|START_OF_IMG|>"), 0
    for tile in range(1, int(tensors["num_patches"].reshape(-1)[0])):
        yield f"{names.get('tile_token', 'TILE')}_{tile}", each
    yield names.get("tile_global_token", "TILE_GLOBAL"), each
    yield names.get("end_of_img_token", "<|END_OF_IMG|>"), 0


def _tiles_in_lines(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Iterator[Any]:
    del names
    vision = config.vision_config
    each = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    fake = "<fake_token_around_image>"
    lines, columns = (int(tensors[name].reshape(-1)[0]) for name in ("rows", "cols"))
    for line in range(lines):
        for column in range(columns):
            yield f"{fake}<row_{line + 1}_col_{column + 1}>", each
        yield "\n", 0
    yield ("\n" if lines else "") + f"{fake}<global-img>", each
    yield fake, 0


def _unpadded(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del names
    height, width, side = _unpadded_size(config, tensors)
    return _rows(side**2 + _classes(config) + height * (width + 1))


def _unpadded_up_to(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del names
    height, width, side = _unpadded_size(config, tensors)
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    ratio = math.sqrt(height * width / (most * side**2))
    if ratio > _MUCH:
        height, width = int(height // ratio), int(width // ratio)
    return _rows(side**2 + height * (width + 1))


#: More tiles than the most by less are not scaled down.
_MUCH: Final = 1.1


def _unpadded_size(config: Any, tensors: Tensors) -> tuple[int, int, int]:
    """Patches of what tiles have of an image: above each other, beside each other; those of a tile.

    A tile more shows the whole.
    """
    from transformers.image_processing_utils import select_best_resolution

    vision = config.vision_config
    height, width = tensors["image_sizes"].reshape(-1).tolist()
    best = select_best_resolution((height, width), config.image_grid_pinpoints)
    side = vision.image_size // vision.patch_size
    high, wide = (length // vision.image_size * side for length in best)
    if width / height > wide / high:
        high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
    return high, wide, side


def _lines(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Iterator[Any]:
    patch = config.vision_config.patch_size * config.spatial_merge_size
    height, width = (int(each) // patch for each in tensors["image_sizes"].reshape(-1))
    yield "", width
    for _ in range(height - 1):
        yield names.get("image_break_token", "[IMG_BREAK]"), width
    yield names.get("image_end_token", "[IMG_END]"), 0


def _merged(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    return _rows(sum(rows for _, rows in _lines(config, tensors, names)))


def _packed_tiles(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Iterator[Any]:
    del names
    each = np.prod(-(-tensors["spatial_shapes"] // config.downsample_factor), axis=1).tolist()
    lines, columns = (int(tensors[name].reshape(-1)[0]) for name in ("rows", "cols"))
    yield "<|image_start|>", 0
    if lines * columns > 1:
        for tile in range(lines * columns):
            yield f"<|img_row_{tile // columns + 1}_col_{tile % columns + 1}|>", each[tile]
        each = each[lines * columns :]
    for whole in each:
        yield "<|img_thumbnail|>" if lines * columns > 1 else "", whole
    yield "<|image_end|>", 0


def _ended_tiles(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Iterator[Any]:
    del names
    each = _per_tile(config.vision_config, 1 / config.downsample_factor)
    count = int(tensors["num_patches"].reshape(-1)[0])
    yield "<|START_OF_IMG|>", each
    for _ in range(count - 1):
        yield "<|IMG_LINE_BREAK|>", each
    yield "<|IMG_LINE_BREAK|><|END_OF_IMG|>", 0


def _fixed(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del tensors, names
    return _rows(config.mm_tokens_per_image)


def _said(config: Any, tensors: Tensors, names: Mapping[str, Any]) -> Layout:
    del config, names
    return _rows(tensors["num_soft_tokens_per_image"].reshape(-1)[0])


_RULES: Final[Mapping[RowCount, Callable[[Any, Tensors, Mapping[str, Any]], Any]]] = {
    RowCount.GRID: _grid,
    RowCount.PATCHES: _patches,
    RowCount.TILES: _tiles,
    RowCount.NAMED_TILES: _named_tiles,
    RowCount.TILES_IN_LINES: _tiles_in_lines,
    RowCount.UNPADDED: _unpadded,
    RowCount.UNPADDED_UP_TO: _unpadded_up_to,
    RowCount.LINES: _lines,
    RowCount.FIXED: _fixed,
    RowCount.SAID: _said,
    RowCount.MOONVIT: _said,
    RowCount.PACKED_TILES: _packed_tiles,
    RowCount.ENDED_TILES: _ended_tiles,
    RowCount.MERGED: _merged,
}
