"""The text workers of a front end: processes that tokenise long texts and render chats."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile

import msgspec

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.text.tokenizers.tokenizer import TextModel, TokenizerError
from tokenpod.service.text.workers.text_messages import (
    EncodeChat,
    Encoded,
    FromWorker,
    Job,
    WorkerOptions,
)
from tokenpod.service.workers.worker import Loaded, Refused
from tokenpod.service.workers.worker_pool import CantStart, PoolLimits, WorkerPool
from tokenpod.service.workers.worker_process import WorkerProcess

log = logging.getLogger("tokenpod.text")

_MODULE = "tokenpod.service.text.workers.text_worker"


class TextWorkers(WorkerPool[Job, Loaded, Encoded]):
    """A pool of workers. Make it with `start`, and `close` it.

    Args:
        model: a file that holds a `TextModel`; closed with the pool.
        settings: how many workers, and what a job may take.
    """

    def __init__(self, model: int, settings: ServerSettings) -> None:
        limits = PoolLimits(
            settings.text_workers,
            settings.text_timeout,
            "--text-timeout",
            settings.text_memory_bytes,
            "--text-memory-bytes",
        )
        super().__init__(limits, "text", log)
        self._model = model

    @classmethod
    async def start(cls, model: TextModel, settings: ServerSettings) -> TextWorkers:
        """All workers, loaded. Raises TokenizerError if one can't be."""
        pool = cls(await asyncio.to_thread(_written, model), settings)
        try:
            await pool.open()
        except CantStart as error:
            raise TokenizerError(f"the tokenizer can't be used in a worker: {error}") from error
        return pool

    def model(self) -> TextModel:
        """What the workers tokenise and render with."""
        return TextModel.read(self._model)

    async def close(self) -> None:
        """Kill all workers, whatever they do, and wait until they are gone. Also twice."""
        open_until_now = not self._closed
        await super().close()
        if open_until_now:
            os.close(self._model)

    async def _start_worker(self) -> WorkerProcess[Loaded, Encoded]:
        options = WorkerOptions(self._model, self._limits.memory_bytes)
        return await WorkerProcess[Loaded, Encoded].start(
            _MODULE, options, FromWorker, inherited=[self._model]
        )

    def _work(self, job: Job) -> str:
        chat = isinstance(job, EncodeChat)
        return "the model's chat template" if chat else "the model's tokenizer"

    def _at_fault(self, job: Job, field: str, refused: Refused) -> InvalidArgument:
        if refused.field:
            return super()._at_fault(job, field, refused)
        return InvalidArgument(field, f"can't be rendered: {refused.message}")


def _written(model: TextModel) -> int:
    """A file without a name that holds `model`."""
    data = msgspec.msgpack.encode(model)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tokenpod-text")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor
