"""A process that decodes images: `python -m tokenpod.service.images.image_worker FD`.

An image's file is a program for its decoder, and what it costs shows only when it runs. So it runs
here: the kernel limits the memory, and the front end kills the process when its time is over
(worker_pool.py). The model's own processor, transformers' by the name in preprocessor_config.json,
then makes tensors of the pixels. They lie in memory that has a descriptor, which the front end
and the engine open by its number: tens of megabytes cross no socket.

Texts of libraries never leave this process: some name addresses of objects (CVE-2026-22778).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpod.core.images import PROCESSOR, SIGHTS, WHOLE_PROCESSOR, RowCount, TensorPlace
from tokenpod.service.images.expansions import Layout, rows_of
from tokenpod.service.images.image_messages import (
    FromImageWorker,
    ImageRead,
    ImageWorkerOptions,
    ProcessorLoaded,
    ReadImage,
    TensorShapes,
    ToImageWorker,
)
from tokenpod.service.images.image_rows import layout_of
from tokenpod.service.workers.worker import Refusal, Refused, refused, work

#: Bytes between tensors in a file begin at multiples of this.
_ALIGNMENT = 64
#: What decides what a processor makes of an image, besides its own code.
_MODEL_CONFIG = "config.json"

Pixels = npt.NDArray[np.uint8]
Tensors = dict[str, npt.NDArray[Any]]


def _load(
    options: ImageWorkerOptions,
) -> tuple[ProcessorLoaded, Callable[[ReadImage], FromImageWorker]]:
    # Python's own way to say that a module is not there: transformers then goes without torch,
    # which would take 600 MB and seconds here, for nothing.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    processor, out = Processor(Path(options.folder)), -1

    def answer(job: ReadImage) -> FromImageWorker:
        nonlocal out
        if out >= 0:
            os.close(out)
        out = os.memfd_create("tokenpod-image")
        return _answer(processor, job, out)

    return ProcessorLoaded(processor.settings, processor.shapes), answer


class Processor:
    """A model's processor of images, from its folder."""

    def __init__(self, folder: Path) -> None:
        # Not above: it takes seconds, and asks whether there is torch.
        import transformers

        from tokenpod.core.image_processors import ImageProcessor

        auto: Any = transformers
        self._config = auto.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self._sight = SIGHTS[self._config.architectures[0]]
        self._process = ImageProcessor(folder, self._config)
        whole = folder / WHOLE_PROCESSOR
        self._names = json.loads(whole.read_bytes()) if whole.is_file() else {}
        digest = hashlib.sha256(self._process.name.encode() + b"\0")
        for name in (PROCESSOR, WHOLE_PROCESSOR, _MODEL_CONFIG):
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
            digest.update(b"\0")
        self.settings = digest.digest()

    def __call__(self, pixels: Pixels) -> Tensors:
        """[height, width, 3] to the tower's arguments, for one image."""
        return self._process(pixels)

    @property
    def shapes(self) -> TensorShapes:
        """Of what it makes."""
        rows, vision = self._sight.rows, self._config.vision_config
        if rows is RowCount.GRID:
            merge, time = int(vision.spatial_merge_size), int(vision.temporal_patch_size)
            patch = vision.patch_size**2 * time
            most = self._process.most_pixels // (vision.patch_size * merge) ** 2
            return TensorShapes(rows, 3 * patch, merge, most_rows=most)
        if rows in (RowCount.PATCHES, RowCount.FIXED):
            side = int(vision.image_size)
            square = {"pixel_values": np.empty((1, 3, side, side), np.bool_)}
            return TensorShapes(rows, side=side, most_rows=rows_of(self.layout(square)))
        return TensorShapes(rows)

    def grid(self, tensors: Tensors) -> tuple[int, ...]:
        """How many rows lie above and beside each other, if they bring positions; else empty."""
        if not self._sight.axes:
            return ()
        _, height, width = tensors["image_grid_thw"].reshape(-1).tolist()
        merge = int(self._config.vision_config.spatial_merge_size)
        return int(height) // merge, int(width) // merge

    def layout(self, tensors: Tensors) -> Layout:
        """How the image stands in a prompt."""
        return layout_of(self._sight.rows, self._config, tensors, self._names)


def _answer(processor: Processor, job: ReadImage, out: int) -> FromImageWorker:
    try:
        pixels = decoded(job)
        if isinstance(pixels, Refused):
            return pixels
        tensors = processor(pixels)
        places, size = _written(tensors, out)
        return ImageRead(out, size, places, processor.layout(tensors), processor.grid(tensors))
    except Exception as error:
        return refused(error)


def decoded(job: ReadImage) -> Pixels | Refused:
    """[height, width, 3] upright, or why it can't be.

    Raises MemoryError, as the decoder does.
    """
    # Not above: tests of other modules do without.
    from PIL import Image, ImageOps, PngImagePlugin

    # The front end has checked the size; a file that says another one later is refused here.
    Image.MAX_IMAGE_PIXELS = job.width * job.height
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(job.data), formats=(job.format,)) as image:
                if image.size != (job.width, job.height):
                    problem = f"{job.width} x {job.height} pixels by its header, and others inside"
                    return Refused(Refusal.JOB, f"has {problem}")
                # Of several pictures in a JPEG (MPF) the first is the photograph.
                frames = getattr(image, "n_frames", 1)
                if job.format != "JPEG" and frames > 1:
                    problem = f"has {frames} frames; images of one frame are taken"
                    return Refused(Refusal.JOB, problem)
                image.load()
                upright = ImageOps.exif_transpose(image)
                if upright.mode.startswith("I"):
                    # 16 bits of grey: Pillow would cut them off at 255.
                    grey = (np.asarray(upright) >> 8).astype(np.uint8)
                    return np.repeat(grey[..., None], 3, axis=2)
                return np.asarray(upright.convert("RGB"))
        except MemoryError:
            raise
        except Exception as error:  # decoders raise whatever they like
            cut = isinstance(error, OSError) and "truncated" in str(error)
            problem = "is cut off" if cut else "can't be decoded"
            return Refused(Refusal.JOB, f"is a {job.format} by its header, and {problem}")


def _written(tensors: Tensors, descriptor: int) -> tuple[list[TensorPlace], int]:
    """Write tensors to a file; where each lies, and the file's bytes."""
    places, at = [], 0
    for name, tensor in tensors.items():
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        numbers = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
        places.append(TensorPlace(name, numbers.dtype.name, [*numbers.shape], at))
        data = memoryview(numbers.data).cast("B")
        while data:
            done = os.pwrite(descriptor, data, at)
            data, at = data[done:], at + done
    return places, at


if __name__ == "__main__":
    sys.exit(work(ToImageWorker, _load))
