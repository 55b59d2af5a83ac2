"""The image workers of a front end, and the files that their tensors lie in."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from tokenpod.core.images import TensorPlace
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import Layout
from tokenpod.service.images.headers import Header
from tokenpod.service.images.image_messages import (
    FromImageWorker,
    ImageRead,
    ImageWorkerOptions,
    ProcessorLoaded,
    ReadImage,
    TensorShapes,
)
from tokenpod.service.workers.worker_pool import PoolLimits, WorkerPool
from tokenpod.service.workers.worker_process import WorkerEnded, WorkerProcess

log = logging.getLogger("tokenpod.images")

_MODULE = "tokenpod.service.images.image_worker"


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Tensors of an image, in memory that other processes of this user can open.

    Args:
        descriptor: of that memory, in this process.
        size: its bytes.
        tensors: where they lie in it.
        layout, grid: as `ImageRead` has them.
    """

    descriptor: int
    size: int
    tensors: list[TensorPlace]
    layout: Layout
    grid: tuple[int, ...] = ()

    def close(self) -> None:
        """Give the memory back. Who has opened it keeps it."""
        os.close(self.descriptor)


class ImageWorkers(WorkerPool[ReadImage, ProcessorLoaded, ImageRead]):
    """A pool of workers. Make it with `start`, and `close` it.

    Args:
        folder: the model's.
        settings: how many workers, and what a job may take.
    """

    #: SHA-256 of what decides what the processor makes of an image; set by `start`.
    processor: bytes = b""
    #: Of what it makes; set by `start`.
    shapes: TensorShapes

    def __init__(self, folder: Path, settings: ServerSettings) -> None:
        limits = PoolLimits(
            settings.image_workers,
            settings.image_timeout,
            "--image-timeout",
            settings.image_memory_bytes,
            "--image-memory-bytes",
        )
        super().__init__(limits, "image", log)
        self._folder = folder

    @classmethod
    async def start(cls, folder: Path, settings: ServerSettings) -> ImageWorkers:
        """All workers, loaded. Raises CantStart if one can't be."""
        pool = cls(folder, settings)
        loaded = (await pool.open())[0]
        pool.processor, pool.shapes = loaded.settings, loaded.shapes
        return pool

    async def read(self, data: bytes, header: Header, *, field: str) -> TensorFile:
        """Decode an image whose header has been checked; `run` says what it raises."""
        pixels = header.width * header.height
        made = await self.run(ReadImage(data, *header), field=field, size=pixels)
        return TensorFile(made.out, made.size, made.tensors, made.layout, made.grid)

    async def _start_worker(self) -> WorkerProcess[ProcessorLoaded, ImageRead]:
        options = ImageWorkerOptions(str(self._folder), self._limits.memory_bytes)
        return await WorkerProcess[ProcessorLoaded, ImageRead].start(
            _MODULE, options, FromImageWorker
        )

    def _taken(
        self, worker: WorkerProcess[ProcessorLoaded, ImageRead], answer: ImageRead
    ) -> ImageRead:
        try:
            own = os.open(f"/proc/{worker.pid}/fd/{answer.out}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WorkerEnded(-signal.SIGKILL) from None
        return structs.replace(answer, out=own)

    def _work(self, job: ReadImage) -> str:
        return "the image's decoder or the model's image processor"
