"""A format that no layer knows: 4 bits in groups, with zeros and a group per input.

Nothing of the product changes for it but two table entries; a rank's part begins inside a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenpod.kernels.backends.cpu import OPERATIONS
from tokenpod.kernels.operations.compose import linear_of
from tokenpod.kernels.operations.weight import LinearWeight, QuantisedWeight
from tokenpod.kernels.products.formats import MADE_AT_LOAD
from tokenpod.models import folder as describing
from tokenpod.models.checkpoints.checkpoint import Checkpoint, Quantised
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.footprint import footprint_of
from tokenpod.models.formats import bytes_needed
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import StoredTensor

CPU = torch.device("cpu")
#: Neither 64 inputs nor 112, nor half of them, are a multiple of it.
GROUP = 24
KINDS = ["llama-biases", "opt-350m", "gpt-neox", "falcon-40b", "phi3"]


@dataclass(frozen=True, slots=True)
class GroupedWeight(QuantisedWeight):
    #: [out, in / 2] uint8: input 2i in the low bits.
    packed: torch.Tensor
    #: [out, groups] float32
    scale: torch.Tensor
    #: [out, groups] float32, whole numbers.
    zero: torch.Tensor
    #: [in] int64
    group: torch.Tensor

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        group = torch.arange(weight.shape[1]) // GROUP
        shape = len(weight), int(group[-1]) + 1
        most, least = torch.zeros(shape), torch.zeros(shape)
        index = group.expand_as(weight)
        most.scatter_reduce_(1, index, weight, "amax")
        least.scatter_reduce_(1, index, weight, "amin")
        scale = (most - least) / 15
        zero = (-least / scale).round()
        numbers = (weight / scale[:, group] + zero[:, group]).round().clamp(0, 15).to(torch.uint8)
        return cls(numbers[:, ::2] | numbers[:, 1::2] << 4, scale, zero, group)

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        groups = (inputs.stop - 1) // GROUP - inputs.start // GROUP + 1
        return len(outputs) * (len(inputs) // 2 + 8 * groups) + 8 * len(inputs)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        if not all(torch.equal(part.group, parts[0].group) for part in parts):
            return None
        tensors = ([getattr(part, name) for part in parts] for name in ("packed", "scale", "zero"))
        return cls(*map(torch.cat, tensors), parts[0].group)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed), len(self.group)

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        return type(self)(self.packed[rows], self.scale[rows], self.zero[rows], self.group)

    def inputs(self, part: range) -> Self:
        group = self.group[part.start : part.stop]
        kept, group = group.unique(return_inverse=True)
        packed = self.packed[:, part.start // 2 : part.stop // 2].clone()
        return type(self)(packed, self.scale[:, kept], self.zero[:, kept], group)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.stack([self.packed & 15, self.packed >> 4], 2).flatten(1).float()
        return ((numbers - self.zero[:, self.group]) * self.scale[:, self.group]).to(dtype)


@dataclass(frozen=True)
class Published:
    """A layout of checkpoints, with the inputs of every second layer's groups out of order."""

    NAMES = ("packed", "scale", "zero", "group")
    name = "published"

    def quantises(self, weight):
        return weight.multiplied and not weight.name.startswith("2.")

    def tensors(self, weight):
        found = {}
        for source in weight.sources:
            n, k = source.stored_shape
            groups = -(-k // GROUP)
            shapes = (n, k // 2), (n, groups), (n, groups), (k,)
            kinds = ("U8",), ("F32",), ("F32",), ("I64",)
            names = (source.name.replace("weight", name) for name in self.NAMES)
            found |= dict(zip(names, map(StoredTensor, shapes, kinds), strict=True))
        return found

    def quantised(self, weight, shard):
        parts = [[shard.part(axis) for axis in source.axes] for source in weight.sources]
        joined = 8 * len(parts[0][1]) * (len(parts) - 1)  # one index of groups is enough
        size = sum(GroupedWeight.bytes_of(*part) for part in parts) - joined
        return Quantised(shard.numbers([weight]), size)

    def read(self, checkpoint, weight, shard, dtype, device):
        parts = []
        for source in weight.sources:
            stored = [
                checkpoint.read(source.name.replace("weight", name)).to(device)
                for name in self.NAMES
            ]
            outputs, inputs = (shard.part(axis) for axis in source.axes)
            rows = source.stored_rows(outputs)
            kept = slice(outputs.start, outputs.stop) if rows is None else torch.from_numpy(rows)
            parts.append(GroupedWeight(*stored).outputs(kept).inputs(inputs))
        joined = GroupedWeight.joined(parts)
        return LinearWeight(tuple(parts) if joined is None else (joined,))


def shuffled(weight: torch.Tensor, order: torch.Tensor) -> GroupedWeight:
    """Groups of inputs that do not lie beside each other."""
    made = GroupedWeight.made_of(weight[:, order])
    back = order.argsort()
    numbers = torch.stack([made.packed & 15, made.packed >> 4], 2).flatten(1)[:, back]
    packed = numbers[:, ::2] | numbers[:, 1::2] << 4
    return GroupedWeight(packed, made.scale, made.zero, made.group[back])


@pytest.fixture
def published(golden, tmp_path, monkeypatch):
    """(a checkpoint of the layout, one of what its numbers stand for)."""
    monkeypatch.setattr(
        describing, "reader_for", lambda spec, asked, *more, **flags: asked and Published()
    )

    def make(name):
        folder = golden(name).folder
        tensors = load_file(folder / "model.safetensors")
        rounded = dict(tensors)
        for weight in read_layout(folder, None).weights:
            for source in weight.sources if Published().quantises(weight) else ():
                if source.name not in tensors:
                    continue  # rows of a fused tensor that was made before
                dense = tensors.pop(source.name)
                order = torch.arange(dense.shape[1])
                order = order.flip(0).roll(7) if weight.name.startswith("1.") else order
                made = shuffled(dense, order)
                rounded[source.name] = made.dequantised(torch.float32)
                for part in Published.NAMES:
                    tensors[source.name.replace("weight", part)] = getattr(made, part).contiguous()
        for kind, weights in (("published", tensors), ("rounded", rounded)):
            (tmp_path / kind).mkdir()
            save_file(weights, tmp_path / kind / "model.safetensors")
            (tmp_path / kind / "config.json").write_bytes((folder / "config.json").read_bytes())
        return tmp_path / "published", tmp_path / "rounded"

    return make


def load(folder, **more):
    return load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None, **more)


def logprobs(model, tokens, schedule):
    scheduler = schedule(model)
    sequence = scheduler.sequence(tokens)
    return torch.cat([scheduler.step([(sequence, n)])[0] for n in (12, 1, 7, 1)])


def read(folder, shard):
    with Checkpoint(folder) as checkpoint:
        layout = read_layout(folder, checkpoint, quantize="groups")
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.float32,
            device=CPU,
            progress=lambda done, total: None,
            shard=shard,
            reader=layout.reader,
        )
    held = sum(weight.nbytes for weight in weights.values())
    needed = bytes_needed(layout.weights, shard, torch.float32, layout.reader)
    # Joined parts share an index of groups; parts of groups out of order have more of these.
    assert (
        held == needed
        if shard == WHOLE and layout.reader == Published()
        else 0.9 < held / needed < 1.1
    )
    return weights


@pytest.mark.parametrize("name", KINDS)
def test_a_published_layout_says_what_its_numbers_stand_for(name, published, schedule, text):
    packed, rounded = published(name)
    small, dense = load(packed, quantize="groups"), load(rounded)
    assert small.weight_bytes < 0.8 * dense.weight_bytes
    tokens = text(21)
    got, expected = logprobs(small, tokens, schedule), logprobs(dense, tokens, schedule)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-biases", "gpt-neox"])
@pytest.mark.parametrize("layer", [0, 1])
def test_parts_that_begin_inside_a_group_add_up(name, layer, published):
    folder, _ = published(name)
    whole, parts = read(folder, WHOLE), [read(folder, Shard(rank, 2)) for rank in range(2)]
    (down,) = whole[f"{layer}.down"].parts
    x = torch.randn(3, 112, generator=torch.Generator().manual_seed(0))
    halves = x.split(56, dim=1)
    sums = [
        linear_of(OPERATIONS, part[f"{layer}.down"].parts[0], None)(half)
        for part, half in zip(parts, halves, strict=True)
    ]
    torch.testing.assert_close(sums[0] + sums[1], down.multiply(x, None), rtol=0, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_made_at_load_by_its_name(world, golden, monkeypatch):
    monkeypatch.setitem(MADE_AT_LOAD, "groups", GroupedWeight)
    folder = golden("llama").folder
    shard = Shard(0, world)
    weights = read(folder, shard)
    assert [type(part) for part in weights["1.qkv"].parts] == [GroupedWeight]
    layout = read_layout(folder, None, quantize="groups")
    needed = bytes_needed(layout.weights, shard, torch.float32, layout.reader)
    assert footprint_of(folder, "groups").weight_bytes(world, 4) == needed


def test_tensors_of_another_kind_are_refused(published):
    folder, _ = published("llama-biases")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("group"))
    save_file(tensors | {name: tensors[name].to(torch.int32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name} holds I32 numbers"):
        load(folder, quantize="groups")
