"""A model's processor of images: pixels to the arguments of its tower, on a CPU, without torch.

It is transformers' own of the name in preprocessor_config.json. Where transformers has one for
torchvision alone it is ours, with Pillow's filters: what it makes differs from torchvision's by
rounding (tests/core/test_image_processors.py). One image at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from tokenpod.core.images import SIGHTS, RowCount, processor_of

#: [height, width, 3].
Pixels = npt.NDArray[np.uint8]
Tensors = dict[str, npt.NDArray[Any]]
Settings = Mapping[str, Any]

_BILINEAR: Final = 2
_BICUBIC: Final = 3
_HALVES: Final = (0.5, 0.5, 0.5)
#: CLIP's, which Command A Vision has.
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)


class ImageProcessor:
    """The processor of the model in a folder.

    Args:
        folder: the model's.
        config: transformers' of the whole model.

    Raises what transformers does about files that it can't read.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        sight = SIGHTS[config.architectures[0]]
        self._call: Callable[[Pixels], Mapping[str, Any]]
        #: What it is, for keys of caches.
        self.name: str
        #: Of an image, where the processor makes grids of patches.
        self.most_pixels = 0
        if own := _OWN.get(sight.rows):
            settings = processor_of(folder) or {}
            # As Kimi's own project publishes them.
            settings = settings.get("media_proc_cfg", settings)
            self._call, self.name = partial(own, settings), own.__name__
            return
        # Not above: it takes seconds. The class by its module: 5.17 of `transformers` itself has
        # it only beside torchvision.
        import transformers
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        options: dict[str, Any] = dict(sight.options)
        if sight.rows in (RowCount.LINES, RowCount.MERGED):
            # transformers' processor of the whole gives it what a row takes.
            options["patch_size"] = config.vision_config.patch_size * config.spatial_merge_size
        # "pil": what torchvision makes of an image differs from version to version.
        auto: Any = AutoImageProcessor
        process = auto.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        if sight.rows is RowCount.GRID:
            self.most_pixels = int(process.size["longest_edge"])
        # Said, not guessed: 1 or 3 pixels of height look like channels (CVE-2026-22773).
        if process.do_rescale and process.do_normalize:
            _look_up(process)
        self._call = partial(
            process, input_data_format="channels_last", return_tensors=None, **options
        )
        self.name = f"{type(process).__qualname__} {transformers.__version__}"

    def __call__(self, pixels: Pixels) -> Tensors:
        """The tower's arguments for one image, and what says how it stands in a prompt."""
        made = self._call(pixels)
        return {name: np.ascontiguousarray(np.asarray(each)) for name, each in made.items()}


def _look_up(process: Any) -> None:
    """Have a processor look up what it makes of each of 256 colours.

    What it computes is the same to the last bit; its own way is three passes in 64 and 32 bits over
    all pixels, which are half of its time.
    """
    rescale, normalize = process.rescale, process.normalize
    factor = 1.0

    def kept(image: npt.NDArray[Any], scale: float, **more: Any) -> npt.NDArray[Any]:
        nonlocal factor
        if image.dtype != np.uint8:
            rescaled: npt.NDArray[Any] = rescale(image, scale, **more)
            return rescaled
        factor = scale
        return image

    def looked_up(
        image: npt.NDArray[Any], mean: list[float], std: list[float], **more: Any
    ) -> npt.NDArray[Any]:
        if image.dtype != np.uint8 or image.ndim != 3:
            normalized: npt.NDArray[Any] = normalize(image, mean, std, **more)
            return normalized
        colours = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (len(image), 256, 1))
        table = normalize(rescale(colours, factor), mean, std, **more)[..., 0]
        return np.stack([own[plane] for own, plane in zip(table, image, strict=True)])

    process.rescale, process.normalize = kept, looked_up


# -- ours ----------------------------------------------------------------------------------------


def _moonvit(said: Settings, pixels: Pixels) -> Tensors:
    """Kimi K2.5: scaled down where it has more patches than it may, and padded at its end."""
    patch = said.get("patch_size", 14)
    merge = said.get("merge_kernel_size", said.get("merge_size", 2))
    most = said.get("in_patch_limit", said.get("max_patches", 16384))
    side = said.get("patch_limit_on_one_side", said.get("size", {}).get("max_height", 512))
    sides = pixels.shape[:2]
    patches = math.prod(max(1, length // patch) for length in sides)
    scale = min(1.0, math.sqrt(most / patches), *(side * patch / length for length in sides))
    height, width = (min(max(1, int(each * scale)), side * patch) for each in sides)
    pixels = _resized(pixels, (height, width), said.get("resample", _BICUBIC))
    whole = patch * merge
    pixels = np.pad(pixels, ((0, -height % whole), (0, -width % whole), (0, 0)))
    lines, columns = (length // patch for length in pixels.shape[:2])
    tiles = _cut(pixels, lines, columns)
    return {
        "pixel_values": _normalised(tiles, said, _HALVES, _HALVES),
        "image_grid_thw": np.array([[1, lines, columns]]),
        "num_soft_tokens_per_image": np.array([lines * columns // merge**2]),
    }


def _packed_tiles(said: Settings, pixels: Pixels) -> Tensors:
    """LFM2-VL: as it is, or, if it is large, tiles and the whole; all as lists of patches."""
    factor, patch = said.get("downsample_factor", 2), said.get("encoder_patch_size", 16)
    fewest, most = said.get("min_image_tokens", 64), said.get("max_image_tokens", 256)
    tile, resample = said.get("tile_size", 512), said.get("resample", _BILINEAR)
    cuts = bool(said.get("do_image_splitting", True))
    tiles = (said.get("min_tiles", 2), said.get("max_tiles", 10)) if cuts else (1, 1)
    row = patch * factor
    sides = pixels.shape[:2]
    near = [max(patch, round(length / row) * row) for length in sides]
    large = math.prod(near) > most * row**2 * said.get("max_pixels_tolerance", 2.0)
    small = _resized(pixels, _within(sides, row, fewest * row**2, most * row**2), resample)
    lines = columns = 1
    parts: list[Pixels] = [small]
    if large and tiles != (1, 1):
        lines, columns = _closest_grid(sides, tiles, tile)
        wide = _resized(pixels, (tile * lines, tile * columns), resample)
        whole = [small] if said.get("use_thumbnail", True) and lines * columns > 1 else []
        parts = [*_cut(wide, lines, columns), *whole]
    shapes = np.array([[length // patch for length in part.shape[:2]] for part in parts])
    # A strip has more than it may, where it would be thinner than a row.
    room = max(most * factor**2, (tile // patch) ** 2 if cuts else 0, *shapes.prod(1))
    values = np.zeros((len(parts), room, 3 * patch**2), np.float32)
    mask = np.zeros((len(parts), room), np.int32)
    for at, part in enumerate(parts):
        patches = _normalised(_cut(part, *shapes[at]), said, _HALVES, _HALVES)
        patches = patches.transpose(0, 2, 3, 1).reshape(len(patches), -1)
        values[at, : len(patches)], mask[at, : len(patches)] = patches, 1
    return {
        "pixel_values": values,
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
        "rows": np.array([lines]),
        "cols": np.array([columns]),
    }


def _tiles_that_fit(said: Settings, pixels: Pixels) -> Tensors:
    """Command A Vision: the tiles that enlarge it least, and the whole."""
    size = said.get("size", {"height": 512})["height"]
    resample, sides = said.get("resample", _BICUBIC), pixels.shape[:2]
    most = said.get("max_patches", 12) if said.get("crop_to_patches", True) else 1
    grids = _grids(1, most)
    scales = [min(size * grid[at] / sides[at] for at in (0, 1)) for grid in grids]
    # Those that are large enough, by how little they enlarge; else what shrinks it least.
    enough = [scale for scale in scales if scale >= 1]
    lines, columns = grids[scales.index(min(enough) if enough else max(scales))]
    parts = [*_cut(_resized(pixels, (size * lines, size * columns), resample), lines, columns)]
    if len(parts) > 1:
        parts.append(_resized(pixels, (size, size), resample))
    return {
        "pixel_values": _normalised(np.stack(parts), said, _MEAN, _DEVIATION),
        "num_patches": np.array([len(parts)]),
    }


_OWN: Final[Mapping[RowCount, Callable[[Settings, Pixels], Tensors]]] = {
    RowCount.MOONVIT: _moonvit,
    RowCount.PACKED_TILES: _packed_tiles,
    RowCount.ENDED_TILES: _tiles_that_fit,
}


def _within(sides: Iterable[int], row: int, fewest: int, most: int) -> tuple[int, int]:
    """Height and width in whole rows of so many pixels' length, with so many pixels in all."""
    height, width = sides
    high, wide = (max(row, round(length / row) * row) for length in (height, width))
    if high * wide > most:
        ratio = math.sqrt(height * width / most)
        high, wide = (max(row, math.floor(x / ratio / row) * row) for x in (height, width))
    elif high * wide < fewest:
        ratio = math.sqrt(fewest / (height * width))
        high, wide = (math.ceil(x * ratio / row) * row for x in (height, width))
    return high, wide


def _closest_grid(sides: Iterable[int], tiles: tuple[int, int], size: int) -> tuple[int, int]:
    """Lines and columns whose form is closest to an image's; of equal ones the largest, unless it
    has more than twice the image's pixels.
    """
    height, width = sides
    best, least = (1, 1), math.inf
    for lines, columns in _grids(*tiles):
        off = abs(width / height - columns / lines)
        if off < least or (off == least and height * width > 0.5 * size**2 * lines * columns):
            best, least = (lines, columns), off
    return best


def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Lines and columns of so many tiles, by their number; of equal ones the narrow first."""
    found = (
        (lines, columns)
        for columns in range(1, most + 1)
        for lines in range(1, most // columns + 1)
        if fewest <= lines * columns
    )
    return sorted(found, key=math.prod)


def _resized(pixels: Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """To a height and a width."""
    if pixels.shape[:2] == size:
        return pixels
    height, width = size
    filter_ = Image.Resampling(resample)
    return np.asarray(Image.fromarray(pixels).resize((width, height), filter_))


def _cut(pixels: Pixels, lines: int, columns: int) -> Pixels:
    """[lines * columns, height / lines, width / columns, 3], line after line."""
    height, width = (x // n for x, n in zip(pixels.shape, (lines, columns), strict=False))
    cut = pixels.reshape(lines, height, columns, width, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(lines * columns, height, width, 3)


def _normalised(
    tiles: Pixels, said: Settings, mean: Iterable[float], deviation: Iterable[float]
) -> npt.NDArray[np.float32]:
    """[n, height, width, 3] -> [n, 3, height, width]."""
    means = np.array(said.get("image_mean", mean), np.float32)
    deviations = np.array(said.get("image_std", deviation), np.float32)
    scaled = tiles.transpose(0, 3, 1, 2) * np.float32(said.get("rescale_factor", 1 / 255))
    made = (scaled - means[:, None, None]) / deviations[:, None, None]
    return made.astype(np.float32, copy=False)
