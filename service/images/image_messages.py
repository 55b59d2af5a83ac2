"""What crosses between a front end and its image workers."""

from __future__ import annotations

from tokenpod.core.images import RowCount, TensorPlace
from tokenpod.core.message import Message
from tokenpod.service.images.expansions import Layout
from tokenpod.service.workers.worker import Loaded, Refused


class ImageWorkerOptions(Message, frozen=True, array_like=True, tag=True):
    """The first message to a new worker.

    Args:
        folder: the model's, with config.json and the settings of its processor.
        memory_bytes: what the worker may take on top of what it has once that is loaded.
    """

    folder: str
    memory_bytes: int


class TensorShapes(Message, frozen=True, array_like=True):
    """What a processor makes of images, of those models whose tensors are taken as they are.

    Args:
        rows: how rows are counted.
        patch: numbers of one patch, with a grid.
        merge: patches of a row, beside each other and above each other.
        side: pixels of a square, without a grid.
        most_rows: of one image; without a grid each has as many.
    """

    rows: RowCount
    patch: int = 0
    merge: int = 1
    side: int = 0
    most_rows: int = 0


class ProcessorLoaded(Loaded, frozen=True, array_like=True, tag=True):
    """The worker is ready.

    Args:
        settings: SHA-256 of all that decides what the processor makes of an image.
        shapes: of what it makes.
    """

    settings: bytes
    shapes: TensorShapes


class ReadImage(Message, frozen=True, array_like=True, tag=True):
    """Decode an image and let the model's processor make tensors of it.

    Args:
        data: the file.
        format, width, height: what its header says.
    """

    data: bytes
    format: str
    width: int
    height: int


class ImageRead(Message, frozen=True, array_like=True, tag=True):
    """What an image has become.

    Args:
        out: descriptor of a file with tensors, in the worker's process until its next job.
        size: bytes of the file.
        tensors: where they lie in it.
        layout: how it stands in a prompt.
        grid: how many lie above and beside each other, if they bring positions; else empty.
    """

    out: int
    size: int
    tensors: list[TensorPlace]
    layout: Layout
    grid: tuple[int, ...] = ()


ToImageWorker = ImageWorkerOptions | ReadImage
FromImageWorker = ProcessorLoaded | ImageRead | Refused
