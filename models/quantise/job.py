"""One quantisation: a dense checkpoint, and an empty folder for the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from tokenpod.core.manifest import digest_of, write_manifest
from tokenpod.core.model_files import small_files
from tokenpod.models.checkpoints.checkpoint import INDEX, Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.source import copy_small_files
from tokenpod.models.checkpoints.writer import Planned, Progress, write_tensors
from tokenpod.models.folder import is_native, read_layout
from tokenpod.models.quantise.calibrate import Calibration, tokens_of
from tokenpod.models.quantise.rounding import least_change, nearest
from tokenpod.models.quantise.targets import Target, target_of
from tokenpod.models.specs.layout import Layout

_WEIGHT = ".weight"


class Job(msgspec.Struct, frozen=True):
    """What to quantise.

    Attributes:
        source: a folder with a dense checkpoint of one of our families.
        folder: empty, for the result.
        format: "int8", "fp8" or "int4".
        group: inputs that share a scale, of int4; None: 128.
        calibrate: a file of text for GPTQ; None: numbers are rounded to the nearest.
        tokens: of that text, at most.
        device: where it is computed.
        shard_bytes: the most that a file of the result has.
    """

    source: str
    folder: str
    format: str
    group: int | None = None
    calibrate: str | None = None
    tokens: int = 65_536
    device: str = "cpu"
    shard_bytes: int = 5 << 30


class Written(msgspec.Struct, frozen=True):
    """What came of it."""

    tensors: int
    bytes: int
    #: Of all weights of products.
    quantised: int


def quantise(job: Job, progress: Progress) -> Written:
    """Fill the job's folder. Raises ModelError with one line, whatever is wrong."""
    source, folder = Path(job.source), Path(job.folder)
    if not is_native(source):
        raise ModelError(f"{source}: only models that Tokenpod computes itself are quantised")
    target = target_of(job.format, job.group)
    with Checkpoint(source) as checkpoint:
        layout = read_layout(source, checkpoint)
        if layout.reader is not None:
            raise ModelError(f"{source} is quantised already ({layout.reader.name})")
        products = _products(layout, target)
        make = _Maker(job, checkpoint, layout, target, products)
        copy_small_files(source, folder)
        _write_config(folder / "config.json", checkpoint, products, target, job)
        tensors = list(_planned(checkpoint, products, target, make))
        digests = write_tensors(folder, tensors, most=job.shard_bytes, progress=progress)
    names = small_files(folder) + ([INDEX] if (folder / INDEX).is_file() else [])
    write_manifest(folder, digests | {name: digest_of(folder / name) for name in names})
    with Checkpoint(folder) as made:
        read_layout(folder, made)
    return Written(len(tensors), sum(x.size for x in tensors), len(products))


#: A tensor of the checkpoint -> numbers [out, in] and scales [out, groups].
Make = Callable[[str], tuple[torch.Tensor, torch.Tensor]]


def _products(layout: Layout, target: Target) -> dict[str, str]:
    """Tensors that are quantised -> the weight of ours that they are (a part of)."""
    found: dict[str, str] = {}
    for weight in layout.weights:
        if not (weight.multiplied or weight.experts is not None):
            continue
        for source in weight.sources:
            if len(source.axes) != 2 or source.stack or not source.name.endswith(_WEIGHT):
                continue
            if source.transposed:
                raise ModelError(
                    f"{layout.spec.architecture} stores {source.name} as [in, out], which "
                    "compressed-tensors has no name for"
                )
            inputs = source.stored_shape[1]
            if inputs % target.length(inputs):
                raise ModelError(
                    f"{source.name} has {inputs} inputs, which groups of {target.group} don't "
                    "divide (--group-size)"
                )
            found[source.name] = weight.name
    if not found:
        raise ModelError(f"{layout.spec.architecture} here has no weight that can be quantised")
    return found


def _planned(
    checkpoint: Checkpoint, products: Mapping[str, str], target: Target, make: Make
) -> Iterator[Planned]:
    """Tensors of the result: those that stay, then the others, weight by weight."""
    for name in sorted(checkpoint.names - products.keys()):
        read = partial(checkpoint.read, name)
        yield Planned(name, checkpoint.dtype(name), checkpoint.shape(name), read)
    last = _Last(make, target)
    for name in products:
        outputs, inputs = checkpoint.shape(name)
        declared = target.declared(outputs, inputs, checkpoint.dtype(name))
        for ending, (dtype, shape) in declared.items():
            read = partial(last.tensor, name, ending)
            yield Planned(name.removesuffix(_WEIGHT) + ending, dtype, shape, read)


@dataclass
class _Last:
    """The tensors of the module that is being written: they are made together."""

    make: Make
    target: Target
    name: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str, ending: str) -> torch.Tensor:
        """One of a module's."""
        if name != self.name:
            made = self.target.tensors(*self.make(name))
            self.name, self.tensors = name, {end: x.cpu() for end, x in made.items()}
        return self.tensors[ending]


class _Maker:
    """Chooses the numbers of one tensor after the other, in the order of `products`."""

    def __init__(
        self,
        job: Job,
        checkpoint: Checkpoint,
        layout: Layout,
        target: Target,
        products: Mapping[str, str],
    ) -> None:
        self._checkpoint, self._target, self._products = checkpoint, target, products
        self._device = torch.device(job.device)
        self._sums: dict[str, torch.Tensor] = {}
        self._left: Iterator[dict[str, torch.Tensor]] = iter(())
        #: Weights whose inputs are listened to: experts' are chosen by each token.
        self._heard: set[str] = set()
        if job.calibrate is not None:
            tokens = tokens_of(Path(job.source), Path(job.calibrate), job.tokens)
            run = Calibration(checkpoint, layout, tokens, self._device)
            asked = set(products.values())
            widths = {
                weight.name: weight.shape[1]
                for weight in layout.weights
                if weight.name in asked and weight.experts is None
            }
            self._heard, self._left = set(widths), run.sums(widths)

    def __call__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [out, in] float32 and scales [out, groups] of a tensor."""
        weight = self._checkpoint.read(name).to(self._device)
        ours, dtype = self._products[name], weight.dtype
        if not bool(weight.isfinite().all()):
            raise ModelError(f"tensor {name} holds numbers that are none")
        if ours not in self._heard:
            return nearest(weight, self._target, dtype)
        while ours not in self._sums:
            self._sums = next(self._left)
        return least_change(weight, self._sums[ours], self._target, dtype)


def _write_config(
    path: Path, checkpoint: Checkpoint, products: Mapping[str, str], target: Target, job: Job
) -> None:
    """The source's config.json, and how weights are held; what else is linear is named."""
    config = dict(read_fields(path).values)
    left = [
        name.removesuffix(_WEIGHT)
        for name in sorted(checkpoint.names - products.keys())
        if name.endswith(_WEIGHT) and len(checkpoint.shape(name)) == 2
    ]
    # A head that is the embedding has no tensor, but other readers make a module of it.
    ignore = sorted({*left, "lm_head"})
    config["quantization_config"] = target.config(ignore, ordered=job.calibrate is not None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
