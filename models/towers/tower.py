"""A model's tower and projector for images: transformers' own modules, by the checkpoint's names.

A tower runs once per image, where the text model runs once per token; what it makes are rows that
stand in for those of the embedding's table (`GivenEmbeddings`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.models.auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
from transformers.utils import logging

try:
    from transformers import vision_utils
except ImportError:  # not in all versions that are allowed
    vision_utils = None  # type: ignore[assignment]

from tokenpod.core.image_processors import ImageProcessor
from tokenpod.core.images import PROCESSOR, SIGHTS, RowCount, processor_of
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields, read_fields
from tokenpod.models.checkpoints.nested import Nesting, text_of

#: Of the text model that comes with a tower's class, and is not wanted.
_TEXT_MODELS = ("language_model", "text_model")
_TEXT_TENSORS = (*_TEXT_MODELS, "lm_head")
#: Tokens of that text model's embedding: its class wants some.
_FEW_TOKENS = 8
#: Of an image, where preprocessor_config.json does not say how many it may have (Qwen2-VL's).
_MOST_PIXELS = 28 * 28 * 1280
#: Heights and widths of images that processors cut into as many tiles as into any.
_LARGE = ((2048, 2048), (1536, 2048), (512, 6144))
#: Kinds of models whose towers read grids and lengths of attention on the host alone; GLM-4V's also
#: adds positions by them, on the device.
_CUT_ON_HOST = (
    *("kimi_k25", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5", "qwen3_5_moe"),
)
_GRID = "image_grid_thw"
_LENGTHS = {"cu_seqlens", "cu_window_seqlens"}
#: Of which a tower keeps what follows from them: 50 bytes for each patch.
_MOST_GRIDS = 32
#: Whether this version of transformers takes what is known of a grid.
_TAKES_LENGTHS = hasattr(vision_utils, "get_vision_cu_seqlens") and (
    "kwargs" in inspect.signature(vision_utils.get_vision_cu_seqlens).parameters
)


class TowerSize(NamedTuple):
    """What a tower takes, in numbers of its dtype."""

    weights: int
    #: While it computes the largest image, at most; about.
    working: int


class LayerCalls(Protocol):
    """What calls a tower's layers in their place."""

    def begin(self) -> None:
        """A new image comes."""
        ...

    def call(
        self, at: int, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What `forward(*args, **named)` of layer `at` yields."""
        ...


class Tower:
    """Computes the rows of images.

    Args:
        model: transformers' base model without its text model, on its device.
        width: numbers of a row: as many as the text model's table has columns, and as many for each
            of its layers behind which something is added.
    """

    def __init__(self, model: Any, width: int) -> None:
        self._model, self.width = model, width
        parameters = [*model.parameters()]
        #: Of its rows.
        self.dtype: torch.dtype = parameters[0].dtype
        self._device = parameters[0].device
        self.weight_bytes = sum(each.nbytes for each in parameters)
        #: What it computes by; processors say more, of which prompts alone depend.
        self._takes = inspect.signature(model.get_image_features).parameters.keys()
        self._between: Callable[[], None] = _nothing
        #: What follows from the last grids.
        self._grids: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        #: None: layers are called as they are.
        self.calls: LayerCalls | None = None
        for at, layer in enumerate(_layers(model)):
            layer.forward = partial(self._layer, at, layer.forward)

    @torch.inference_mode()
    def __call__(
        self, tensors: Mapping[str, torch.Tensor], between: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """The rows of one image, [rows, width] on its device, in the order of the current stream.

        Args:
            tensors: what the model's processor made of it, on a CPU.
            between: is called before each layer.

        Raises what transformers' code does with tensors that are not for it.
        """
        known = self._of_grid(tensors)
        given = {
            name: tensor if name == _GRID and known else self._there(tensor, self.dtype)
            for name, tensor in tensors.items()
            if name in self._takes
        }
        self._between = between or _nothing
        if self.calls is not None:
            self.calls.begin()
        made = self._model.get_image_features(**given, **known)
        # Of one image: a tensor of tiles, or a list of one image or of its tiles.
        parts = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        parts = [part if isinstance(part, torch.Tensor) else torch.cat([*part]) for part in parts]
        return torch.cat([part.flatten(0, -2) for part in parts], dim=-1)

    def _layer(self, at: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._between()
        if self.calls is None:
            return forward(*args, **named)
        return self.calls.call(at, forward, args, named)

    def _of_grid(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `_of_grid` finds, lengths on the host, all else on the device."""
        if (grid := tensors.get(_GRID)) is None:
            return {}
        known = self._grids.get(key := (*grid.flatten().tolist(),))
        if known is None:
            known = _of_grid(self._model, tensors)
            for name in known.keys() - _LENGTHS:
                known[name] = self._there(known[name])
            self._grids[key] = known
            if len(self._grids) > _MOST_GRIDS:
                self._grids.pop(next(iter(self._grids)))
        return known

    def _there(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """On the device; numbers that are no integers in `dtype`, unless that is None."""
        if self._device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # else the copy waits for the device
        there = tensor.to(self._device, non_blocking=True)
        return there.to(dtype) if tensor.is_floating_point() and dtype else there


def _nothing() -> None:
    """Between layers, where nobody waits."""


def _layers(model: Any) -> list[Any]:
    """The layers of a tower: of its lists of modules the longest."""
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return [*max(lists, key=len, default=())]


def _of_grid(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What follows from an image's grid alone, computed on the host.

    Where attention begins anew in the patches: transformers cuts queries, keys and values there,
    and to read it from the device it would wait three times per layer, behind all that steps have
    queued. And where patches are: some 40 small launches on the device, and waits for counts.
    """
    grid, config = tensors.get(_GRID), model.config
    if grid is None or config.model_type not in _CUT_ON_HOST or not _TAKES_LENGTHS:
        return {}
    found = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grid)}
    visual = getattr(model, "visual", None)
    if visual is not None:
        merge = visual.spatial_merge_size
        found["position_ids"] = vision_utils.get_vision_position_ids(grid, merge)
        if hasattr(visual, "interpolation_mode"):  # Qwen3-VL's: of a table of positions
            taps = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                visual.num_grid_per_side,
                visual.interpolation_mode,
                visual.interpolation_align_corners,
                merge,
            )
            found["interp_indices"], found["interp_weights"] = taps
    if window := getattr(config.vision_config, "window_size", None):  # Qwen2.5-VL's
        vision = config.vision_config
        index, cut = vision_utils.get_vision_window_index(
            grid, vision.spatial_merge_size, window, vision.patch_size
        )
        found |= {"window_index": index, "cu_window_seqlens": cut}
    return found


def load_tower(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of a checkpoint that `sees_images`.

    Raises ModelError if tensors are missing or left over.
    """
    nesting = text_of(read_fields(folder / "config.json")).nesting
    assert nesting is not None
    with Checkpoint(folder) as checkpoint:
        return _read(folder, checkpoint, nesting, dtype, device)


def largest_image(folder: Path, most_rows: int) -> dict[str, torch.Tensor]:
    """What a model's processor makes of the largest image, with 0 for all numbers.

    `most_rows`: of those that have at most so many.
    """
    config = read_fields(folder / "config.json")
    vision, channels = config.fields("vision_config"), 3
    sight = SIGHTS[config.texts("architectures")[0]]
    if sight.rows is not RowCount.GRID:
        return _most_numbers(folder, _config(folder)[0])
    patch = vision.integer("patch_size")
    processor = Fields(processor_of(folder) or {}, str(folder / PROCESSOR))
    merge, time = processor.integer("merge_size", 2), processor.integer("temporal_patch_size", 2)
    size = processor.fields("size") if "size" in processor else processor
    pixels = size.integer("longest_edge", processor.integer("max_pixels", _MOST_PIXELS))
    side = max(min(math.isqrt(pixels) // (patch * merge), math.isqrt(most_rows)), 1) * merge
    numbers = channels * time * patch**2
    grid = torch.tensor([[1, side, side]])
    return {"pixel_values": torch.zeros(side * side, numbers), "image_grid_thw": grid}


def tower_size(folder: Path, most_rows: int) -> TowerSize:
    """Of a checkpoint that `sees_images`: no weights are read."""
    config, _ = _config(folder)
    with torch.device("meta"):
        base = _without_text(_class_of(config)(config))
    numbers = sum(each.numel() for each in base.parameters())
    vision: Any = config.vision_config
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    wide = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    # Of a layer: the stream with queries, keys and values before and behind rotation, or with the
    # gated product. Some projectors choose among the outputs of all layers, which are kept.
    each = max(9 * hidden, 3 * (hidden + wide))
    each += layers * hidden if hasattr(config, "vision_feature_layer") else 0
    pixels = largest_image(folder, most_rows)["pixel_values"].numel()
    patch = math.prod(np.broadcast_to(vision.patch_size, 2).tolist()) * 3
    patch *= getattr(vision, "temporal_patch_size", 1)
    return TowerSize(numbers, pixels * 2 + pixels // patch * each)


def _most_numbers(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """What the processor makes of large images of several shapes: that with most numbers."""
    process = ImageProcessor(folder, config)
    made = (process(np.zeros((*sides, 3), np.uint8)) for sides in _LARGE)
    most = max(made, key=lambda tensors: tensors["pixel_values"].size)
    return {name: torch.from_numpy(each) for name, each in most.items()}


def _read(
    folder: Path, checkpoint: Checkpoint, nesting: Nesting, dtype: torch.dtype, device: torch.device
) -> Tower:
    config, width = _config(folder)
    others = ("mtp", "audio_tower", "embed_audio")
    parts = tuple(part for part in nesting.unused if not part.endswith(others))
    stored = {x: _Stored(checkpoint, x) for x in checkpoint.names if x.startswith(parts)}
    library: Any = logging
    library.disable_progress_bar()
    library.set_verbosity_error()  # what is missing is an error of ours
    whole, report = _class_of(config).from_pretrained(
        None,
        config=config,
        state_dict=stored,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # we report them
        output_loading_info=True,
    )
    for kind, problem in (
        ("missing_keys", "is missing from the checkpoint"),
        ("mismatched_keys", "has another shape than config.json says"),
        ("unexpected_keys", "is none of those that the model's tower has"),
    ):
        names = (each if isinstance(each, str) else str(each[0]) for each in report[kind])
        wrong = sorted(x for x in names if not any(part in x for part in _TEXT_TENSORS))
        if wrong:
            without = "with --max-images 0 the model is served as text alone"
            raise ModelError(f"{folder}: tensor {wrong[0]} {problem}; {without}")
    base = _without_text(whole)
    # Qwen3-VL's: one for each layer of the text model behind which its rows are added.
    deeper = len(getattr(getattr(base, "visual", None), "deepstack_merger_list", ()))
    return Tower(base.eval().requires_grad_(False).to(device), width * (1 + deeper))


def _config(folder: Path) -> tuple[PreTrainedConfig, int]:
    """The whole model's, with next to no text model; and the width of what that reads."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "audio_config"):
        cast(Any, config).audio_config = None  # it hears, too
    text = config.get_text_config(decoder=True)
    width = text.hidden_size
    _shrink(config, text)
    return config, width


def _class_of(config: PreTrainedConfig) -> Any:
    # Not by the architecture that config.json names: Kimi's own project has another name.
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def _without_text(whole: Any) -> Any:
    base = whole.model
    for name in _TEXT_MODELS:
        if hasattr(base, name):
            delattr(base, name)
    return base


def _shrink(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Leave next to nothing of the text model, which is read and served by itself."""
    # What is quantised is the text model: a tower that is, too, has other tensors.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    text.num_hidden_layers = 0
    text.vocab_size = _FEW_TOKENS
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for each in (config, text):
        each.tie_word_embeddings = False


class _Stored:
    """A tensor that transformers has not asked for yet: it does by `stored[...]`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._checkpoint.read(self._name)[index]
