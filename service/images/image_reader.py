"""A request's images: checked, decoded in a worker, and what is remembered of those seen before."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from tokenpod.core.images import PROCESSOR, SIGHTS, PreparedImage, TensorPlace
from tokenpod.core.requests import ImageRun
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import ImageTexts, no_token
from tokenpod.service.images.headers import Header, ImageError, read_header
from tokenpod.service.images.image_messages import (
    FromImageWorker,
    ImageRead,
    ImageWorkerOptions,
    ProcessorLoaded,
    ReadImage,
)
from tokenpod.service.workers.worker_pool import PoolLimits, WorkerPool
from tokenpod.service.workers.worker_process import WorkerEnded, WorkerProcess

log = logging.getLogger("tokenpod.images")

#: Images whose numbers of rows are remembered.
_MOST_KNOWN = 1 << 14


@dataclass(slots=True)
class SeenImage:
    """An image of a request: how many rows it has, and its tensors, unless it was seen before."""

    given: GivenImage
    header: Header
    key: bytes
    rows: int = 0
    grid: tuple[int, ...] = ()
    file: TensorFile | None = None

    @property
    def prepared(self) -> PreparedImage:
        """For the engine."""
        if self.file is None:
            return PreparedImage(self.key, self.rows, self.grid)
        tensors = tuple(self.file.tensors)
        return PreparedImage(self.key, self.rows, self.grid, self.file.descriptor, tensors)


class ImageReader:
    """Reads the images of requests. Make it with `start`.

    Args:
        workers: decode.
        tokens: the model's for images.
        settings: the limits.
    """

    def __init__(
        self, workers: ImageWorkers, tokens: ImageTokens, settings: ServerSettings
    ) -> None:
        self._workers, self._settings = workers, settings
        self.tokens = tokens
        #: Rows and grid of images that were seen.
        self._known: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = OrderedDict()

    @classmethod
    async def start(
        cls,
        folder: Path,
        settings: ServerSettings,
        name_of: Callable[[int], str | None],
        life: AsyncExitStack,
    ) -> ImageReader | None:
        """With workers that end with `life`; None: images of this model are not read.

        `name_of`: of a token's id. Raises CantStart.
        """
        config_file = folder / "config.json"
        if not (settings.max_images and (folder / PROCESSOR).is_file() and config_file.is_file()):
            return None
        try:
            config = json.loads(await asyncio.to_thread(config_file.read_bytes))
        except ValueError:
            return None  # the engine says what is wrong with it
        if (config.get("architectures") or [""])[0] not in SIGHTS:
            return None
        tokens = ImageTokens.of(config, name_of)
        if tokens is None:
            log.warning("config.json names no token for images: they are refused")
            return None
        workers = await ImageWorkers.start(folder, settings)
        life.push_async_callback(workers.close)
        return cls(workers, tokens, settings)

    def check(self, images: Sequence[GivenImage]) -> list[Header]:
        """All that can be said before anything is decoded. Raises InvalidArgument."""
        return check_images(images, self._settings)

    async def read(self, images: Sequence[GivenImage]) -> list[SeenImage]:
        """How many rows each has; decoded are those that were not seen before.

        Raises InvalidArgument, also if a worker's time or memory is over, and Unavailable.
        """
        headers = self.check(images)
        seen: list[SeenImage] = []
        try:
            for given, header in zip(images, headers, strict=True):
                key = await asyncio.to_thread(self._key, given.data)
                image = SeenImage(given, header, key)
                seen.append(image)
                if key in self._known:
                    self._known.move_to_end(key)
                    image.rows, image.grid = self._known[key]
                else:
                    await self.decode(image)
        except BaseException:
            close_all(seen)
            raise
        return seen

    async def decode(self, image: SeenImage) -> None:
        """Have its tensors made. Raises as `read` does."""
        data, field = image.given.data, image.given.field
        image.file = await self._workers.read(data, image.header, field=field)
        image.rows, image.grid = self._known[image.key] = image.file.rows, image.file.grid
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def texts(self, seen: Sequence[SeenImage]) -> ImageTexts:
        """What stands for them in a chat."""
        return self.tokens.texts([image.rows for image in seen])

    def _key(self, data: bytes) -> bytes:
        return hashlib.sha256(self._workers.processor + hashlib.sha256(data).digest()).digest()


def close_all(seen: Sequence[SeenImage]) -> None:
    """Give the memory of their tensors back."""
    for image in seen:
        if image.file is not None:
            image.file.close()
            image.file = None


# -- what can be checked without decoding ------------------------------------------------------

#: The longer side of an image by the shorter: beyond, processors make strips of nothing, or fail.
MOST_RATIO = 200


def check_images(images: Sequence[GivenImage], settings: ServerSettings) -> list[Header]:
    """What the headers of a request's images say. Takes microseconds for each.

    Raises InvalidArgument, which names the first image that is refused, its value and the limit.
    """
    if len(images) > settings.max_images:
        problem = (
            f"is image {settings.max_images + 1} of {len(images)}; this server allows"
            f" {settings.max_images} (--max-images)"
        )
        raise InvalidArgument(images[settings.max_images].field, problem)
    return [_check(image, settings) for image in images]


def _check(image: GivenImage, settings: ServerSettings) -> Header:
    size, most = len(image.data), settings.max_image_bytes
    if size > most:
        problem = f"has {size} bytes; this server allows {most} (--max-image-bytes)"
        raise InvalidArgument(image.field, problem)
    try:
        header = read_header(image.data)
    except ImageError as error:
        raise InvalidArgument(image.field, str(error)) from None
    pixels, most = header.width * header.height, settings.max_image_pixels
    shown = f"{header.width} x {header.height}"
    if pixels > most:
        problem = f"has {shown} pixels; this server allows {most} in all (--max-image-pixels)"
        raise InvalidArgument(image.field, problem)
    longer, shorter = max(header.width, header.height), min(header.width, header.height)
    if longer > MOST_RATIO * shorter:
        problem = f"has {shown} pixels; one side may be {MOST_RATIO} times the other"
        raise InvalidArgument(image.field, problem)
    return header


# -- which tokens stand for an image -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """A model's tokens for images.

    Args:
        token_id: has a row of an image each time.
        token: its name, which a chat template writes once for an image.
        opening, closing: what the template writes around that, for texts without one.
    """

    token_id: int
    token: str
    opening: str = ""
    closing: str = ""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], name_of: Callable[[int], str | None]
    ) -> ImageTokens | None:
        """Those of a config.json; None: it names none, or the tokenizer has none of that id.

        `name_of`: the tokenizer's.
        """
        sight = SIGHTS[config["architectures"][0]]
        token_id = config.get(sight.token)
        token = name_of(token_id) if isinstance(token_id, int) else None
        if token_id is None or token is None:
            return None
        wrapping = [name_of(config[name]) or "" for name in sight.wrapping if name in config]
        return cls(token_id, token, *wrapping)

    def texts(self, rows: Sequence[int]) -> ImageTexts:
        """What stands in a chat for images with so many rows each."""
        return ImageTexts(self.token, [self.token * count for count in rows])

    def within(self, text: str, places: Sequence[int], rows: Sequence[int], field: str) -> str:
        """A text with images at these offsets, of so many rows each.

        Raises InvalidArgument, which names `field`, for a text that has the token itself.
        """
        if self.token in text:
            raise InvalidArgument(field, no_token(self.token))
        parts, begin = [], 0
        for place, count in zip(places, rows, strict=True):
            parts += [text[begin:place], self.opening, self.token * count, self.closing]
            begin = place
        return "".join([*parts, text[begin:]])

    def runs(self, prompt: Sequence[int], rows: Sequence[int]) -> list[ImageRun]:
        """Where a prompt has the rows of images with so many each.

        Raises InvalidArgument if it has not as many places: its beginning is cut off.
        """
        places = [at for at, token in enumerate(prompt) if token == self.token_id]
        if len(places) != sum(rows):
            problem = f"leaves {len(places)} of the {sum(rows)} tokens that stand for images"
            raise InvalidArgument("truncate", problem)
        found: list[ImageRun] = []
        for image, count in enumerate(rows):
            own, places = places[:count], places[count:]
            first = 0
            for at in range(1, count + 1):
                if at == count or own[at] != own[at - 1] + 1:
                    found.append(ImageRun(image, first, own[first], at - first))
                    first = at
        return found


# -- workers, and the files that their tensors lie in ------------------------------------------

_MODULE = "tokenpod.service.images.image_worker"


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Tensors of an image, in memory that other processes of this user can open.

    Args:
        descriptor: of that memory, in this process.
        size: its bytes.
        tensors: where they lie in it.
        rows: how many tokens stand for the image in a prompt.
        grid: as `ImageRead` has it.
    """

    descriptor: int
    size: int
    tensors: list[TensorPlace]
    rows: int
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
        pool.processor = (await pool.open())[0].settings
        return pool

    async def read(self, data: bytes, header: Header, *, field: str) -> TensorFile:
        """Decode an image whose header has been checked; `run` says what it raises."""
        pixels = header.width * header.height
        made = await self.run(ReadImage(data, *header), field=field, size=pixels)
        return TensorFile(made.out, made.size, made.tensors, made.rows, made.grid)

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
