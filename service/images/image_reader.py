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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tokenpod.core.images import SIGHTS, PreparedImage, processor_of
from tokenpod.core.requests import ImageRun
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod.service.calls.images import GivenImage, GivenTensors, image_bytes
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import ImageTexts, Layout, no_token, rows_of
from tokenpod.service.images.given_tensors import check_tensors
from tokenpod.service.images.headers import Header, ImageError, read_header
from tokenpod.service.images.image_messages import (
    FromImageWorker,
    ImageRead,
    ImageWorkerOptions,
    ProcessorLoaded,
    ReadImage,
    TensorFile,
    TensorShapes,
)
from tokenpod.service.workers.worker_pool import PoolLimits, WorkerPool
from tokenpod.service.workers.worker_process import WorkerEnded, WorkerProcess

if TYPE_CHECKING:
    from tokenpod.service.images.image_urls import ImageUrls

log = logging.getLogger("tokenpod.images")

#: Images whose numbers of rows are remembered.
_MOST_KNOWN = 1 << 14


@dataclass(slots=True)
class SeenImage:
    """An image of a request: how it stands in a prompt; its tensors, unless it was seen before."""

    given: GivenImage
    key: bytes
    layout: Layout = ()
    grid: tuple[int, ...] = ()
    file: TensorFile | None = None

    @property
    def rows(self) -> int:
        """Tokens that stand for it, one row of embeddings each."""
        return rows_of(self.layout)

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
        urls: fetches images; None: none is fetched.
    """

    def __init__(
        self,
        workers: ImageWorkers,
        tokens: ImageTokens,
        settings: ServerSettings,
        urls: ImageUrls | None = None,
    ) -> None:
        self._workers, self._settings, self.urls = workers, settings, urls
        self.tokens = tokens
        #: Layout and grid of images that were seen.
        self._known: OrderedDict[bytes, tuple[Layout, tuple[int, ...]]] = OrderedDict()

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
        if not (settings.max_images and processor_of(folder) and config_file.is_file()):
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
        urls = None
        if hosts := settings.resolved_image_hosts:
            # Not above: few servers fetch any.
            from tokenpod.service.images.image_urls import ImageUrls

            urls = ImageUrls(hosts, settings.max_image_bytes, settings.image_url_timeout)
            life.push_async_callback(urls.close)
        return cls(workers, tokens, settings, urls)

    def check(self, images: Sequence[GivenImage]) -> None:
        """All that can be said before anything is fetched or decoded.

        Raises InvalidArgument, or Unimplemented for a URL where none is fetched.
        """
        check_count(images, self._settings)
        for image in images:
            if not image.uri:
                check_image(image, self._settings)
            elif self.urls is None:
                problem = "is not supported: this server fetches no images (--image-url-hosts)"
                raise Unimplemented(image.field, problem)
            else:
                self.urls.check(image)

    def bytes_of(self, images: Sequence[GivenImage]) -> int:
        """Of their files, at most."""
        return image_bytes(images, self._settings.max_image_bytes)

    async def read(self, images: Sequence[GivenImage]) -> list[SeenImage]:
        """How each stands in a prompt; fetched are all, decoded those that were not seen before.

        Raises InvalidArgument, also if a worker's time or memory is over, and Unavailable.
        """
        self.check(images)
        seen: list[SeenImage] = []
        try:
            for given in images:
                if given.uri and self.urls is not None:
                    given = await self.urls.fetch(given)
                check_image(given, self._settings)
                key = await asyncio.to_thread(self._key, given.data)
                image = SeenImage(given, key)
                seen.append(image)
                if key in self._known:
                    self._known.move_to_end(key)
                    image.layout, image.grid = self._known[key]
                else:
                    await self.decode(image)
        except BaseException:
            close_all(seen)
            raise
        return seen

    async def decode(self, image: SeenImage) -> None:
        """Have its tensors made. Raises as `read` does."""
        data, field = image.given.data, image.given.field
        header = check_image(image.given, self._settings)
        image.file = await self._workers.read(data, header, field=field)
        found = self._known[image.key] = image.file.layout, image.file.grid
        image.layout, image.grid = found
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def check_tensors(self, given: GivenTensors, prompt: Sequence[int]) -> list[SeenImage]:
        """A prompt's images that came as tensors. Raises InvalidArgument."""
        checking = partial(
            check_tensors,
            *(given, prompt, self.tokens.token_id, self._workers.shapes),
            most=self._settings.max_images,
            axes=self.tokens.axes,
        )
        seen: list[SeenImage] = []

        def check() -> None:
            for image in checking():
                whole = GivenImage(b"", given.field)
                key = hashlib.sha256(self._workers.processor + image.key).digest()
                layout = (("", image.rows),)
                seen.append(SeenImage(whole, key, layout, image.grid, image.file))

        try:
            await asyncio.to_thread(check)
        except BaseException:
            close_all(seen)
            raise
        return seen

    def texts(self, seen: Sequence[SeenImage]) -> ImageTexts:
        """What stands for them in a chat."""
        return self.tokens.texts([image.layout for image in seen])

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


def check_count(images: Sequence[GivenImage], settings: ServerSettings) -> None:
    """Raise InvalidArgument for more images than a request may have."""
    if len(images) > settings.max_images:
        problem = (
            f"is image {settings.max_images + 1} of {len(images)}; this server allows"
            f" {settings.max_images} (--max-images)"
        )
        raise InvalidArgument(images[settings.max_images].field, problem)


def check_image(image: GivenImage, settings: ServerSettings) -> Header:
    """What its header says. Takes microseconds.

    Raises InvalidArgument, which names the image, its value and the limit.
    """
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
        row: its name.
        token: what a chat template writes once for an image; empty: the same.
        opening, closing: what the template writes around that, for texts without one.
        before, behind: what it does not write, and rows have around them.
        axes: rows bring positions of three axes.
    """

    token_id: int
    row: str
    token: str = ""
    opening: str = ""
    closing: str = ""
    before: str = ""
    behind: str = ""
    axes: bool = False

    @classmethod
    def of(
        cls, config: Mapping[str, Any], name_of: Callable[[int], str | None]
    ) -> ImageTokens | None:
        """Those of a config.json; None: it names none, or the tokenizer has none of that id.

        `name_of`: the tokenizer's.
        """
        sight = SIGHTS[config["architectures"][0]]

        def names(*fields: str) -> list[str]:
            found = [config.get(name, name) for name in fields]
            # A text that no field names stands for itself; a field of no number for nothing.
            found = [each for each in found if isinstance(each, int) or "<" in str(each)]
            return [each if isinstance(each, str) else name_of(each) or "" for each in found]

        token_id = config.get(sight.token)
        row = name_of(token_id) if isinstance(token_id, int) else None
        if token_id is None or row is None:
            return None
        # A template that lacks one of the two has other ways.
        opening, closing = _pair(names(*sight.wrapping))
        before, behind = _pair(names(*sight.enclosing))
        return cls(
            token_id,
            row,
            (names(sight.written) or [sight.written])[0],
            opening,
            closing,
            sight.spacing + before,
            behind + sight.spacing,
            sight.axes,
        )

    @property
    def written(self) -> str:
        """What stands once for an image before it is known how many rows it has."""
        return self.token or self.row

    def texts(self, layouts: Sequence[Layout]) -> ImageTexts:
        """What stands in a chat for images with these layouts."""
        return ImageTexts(self.written, self.row, [self.expansion(each) for each in layouts])

    def expansion(self, layout: Layout) -> str:
        """What stands for one image."""
        parts = (text + self.row * rows for text, rows in layout)
        return "".join((self.before, *parts, self.behind))

    def within(
        self, text: str, places: Sequence[int], layouts: Sequence[Layout], field: str
    ) -> str:
        """A text with images of these layouts at these offsets.

        Raises InvalidArgument, which names `field`, for a text that has a token for images itself.
        """
        if problem := no_token(text, (self.written, self.row)):
            raise InvalidArgument(field, problem)
        parts, begin = [], 0
        for place, layout in zip(places, layouts, strict=True):
            parts += [text[begin:place], self.opening, self.expansion(layout), self.closing]
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


def _pair(names: Sequence[str]) -> tuple[str, str]:
    """What stands before and behind; nothing, unless there are both."""
    return (names[0], names[1]) if len(names) > 1 else ("", "")


# -- workers ------------------------------------------------------------------------------------

_MODULE = "tokenpod.service.images.image_worker"


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
            settings.resolved_image_workers,
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
