"""LoRA adapters as PEFT saves them, added to the weights that they adapt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields, read_fields
from tokenpod.models.checkpoints.source import tensors_of
from tokenpod.models.checkpoints.writer import Planned

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Endings of a pair, the first of which is multiplied first.
_PAIRS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))


def merged(tensors: Sequence[Planned], adapter: Path) -> list[Planned]:
    """The base's tensors with an adapter's products added, computed in float32.

    With DoRA ("DoRA: Weight-Decomposed Low-Rank Adaptation", Liu et al., 2024) each output's row of
    the sum is then brought to the length that the adapter has for it.

    Whole tensors of the adapter (`modules_to_save`, trained biases) replace the base's. Raises
    ModelError for adapters of other kinds, and for those of another base.
    """
    fields = read_fields(adapter / CONFIG)
    fields.only("peft_type", "LORA")
    fields.only("layer_replication", None)
    transposed = fields.flag("fan_in_fan_out", False)
    left = {_name(tensor.name): tensor for tensor in tensors_of(adapter / WEIGHTS)}
    made, of_embedding = [], None
    for base in tensors:
        stem = base.name.removesuffix(".weight")
        pair = next((p for p in _PAIRS if stem + p[0] in left and stem + p[1] in left), None)
        if base.name in left:
            # PEFT saves the table that an embedding's or a head's factors belong to beside them.
            base = _replaced(base, left.pop(base.name))
        if pair is not None:
            first, second = (left.pop(stem + end) for end in pair)
            if pair == _PAIRS[1]:
                of_embedding = first, second
            flipped = transposed or pair == _PAIRS[1]
            scale = _scale(fields, stem, first.shape[0])
            sum_ = _added(base, first, second, scale, transposed=flipped)
            if fields.flag("use_dora", False):
                lengths = _lengths(left, stem, adapter, is_linear=pair == _PAIRS[0])
                sum_ = _of_length(sum_, lengths, by_column=transposed)
            made.append(sum_.as_dtype(base.dtype))
        else:
            made.append(base)
    if of_embedding is not None and fields.flag("ensure_weight_tying", False):
        _leave_tied(left, *of_embedding)
    if left:
        names = ", ".join(sorted(left)[:3])
        raise ModelError(f"{adapter / WEIGHTS}: the base has no weight for {names}")
    return made


def _leave_tied(left: dict[str, Planned], first: Planned, second: Planned) -> None:
    """Take out what is saved once more for a head that is the embedding: the same factors."""
    down, up = _PAIRS[0]
    for stem in [name.removesuffix(down) for name in left if name.endswith(down)]:
        both = left[stem + down], left.get(stem + up)
        if all(
            own is not None
            and own.shape == other.shape[::-1]
            and torch.equal(own.read(), other.read().t())
            for own, other in zip(both, (second, first), strict=True)
        ):
            for name in (stem + down, stem + up, f"{stem}.weight"):
                left.pop(name, None)


def _name(name: str) -> str:
    """The base's name for a tensor of an adapter."""
    name = name.removeprefix(_PREFIX)
    return name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")


def _scale(fields: Fields, stem: str, rank: int) -> float:
    alpha = fields.real("lora_alpha")
    if "alpha_pattern" in fields:
        patterns = fields.fields("alpha_pattern")
        own = [key for key in patterns.values if re.search(rf"(^|\.){key}$", stem)]
        alpha = patterns.real(own[0]) if own else alpha
    return alpha / (rank**0.5 if fields.flag("use_rslora", False) else rank)


def _replaced(base: Planned, own: Planned) -> Planned:
    if own.shape != base.shape:
        raise ModelError(f"{own.name} has shape {list(own.shape)}; the base's {list(base.shape)}")
    return Planned(base.name, base.dtype, base.shape, lambda: own.read().to(base.dtype))


def _added(
    base: Planned, first: Planned, second: Planned, scale: float, *, transposed: bool
) -> Planned:
    rows, columns = (*second.shape[:1], *first.shape[1:]) if len(first.shape) == 2 else (0, 0)
    shape = (columns, rows) if transposed else (rows, columns)
    if shape != base.shape or second.shape[1:] != first.shape[:1]:
        raise ModelError(
            f"{first.name} and {second.name} have shapes {list(first.shape)} and"
            f" {list(second.shape)}; {base.name} of the base has {list(base.shape)}"
        )

    def read() -> torch.Tensor:
        delta = second.read().float() @ first.read().float()
        delta = delta.t() if transposed else delta
        return base.read().float().add_(delta, alpha=scale)

    return Planned(base.name, torch.float32, base.shape, read)


def _lengths(left: dict[str, Planned], stem: str, adapter: Path, *, is_linear: bool) -> Planned:
    """The lengths of a weight's outputs; older files have another name for them."""
    names = [f"{stem}.lora_magnitude_vector{end}" for end in (".weight", "")]
    found = next((left.pop(name) for name in names if name in left), None)
    if found is None:
        raise ModelError(f"{adapter / WEIGHTS}: use_dora is true, and it has no {names[0]}")
    if not is_linear:
        raise ModelError(f"{adapter / WEIGHTS}: {found.name}: DoRA of embeddings is not supported")
    return found


def _of_length(weight: Planned, lengths: Planned, *, by_column: bool) -> Planned:
    """A weight whose outputs, its rows or columns, have these lengths."""
    outputs = weight.shape[int(by_column)]
    if lengths.shape != (outputs,):
        raise ModelError(
            f"{lengths.name} has shape {list(lengths.shape)}; {weight.name} has {outputs} outputs"
        )

    def read() -> torch.Tensor:
        numbers, wanted = weight.read(), lengths.read().float()
        own = numbers.norm(dim=0 if by_column else 1)
        factor = wanted / own
        return numbers.mul_(factor if by_column else factor[:, None])

    return Planned(weight.name, weight.dtype, weight.shape, read)
