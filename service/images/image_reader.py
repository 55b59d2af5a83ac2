"""A request's images: checked, decoded in a worker, and what is remembered of those seen before."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenpod.core.images import PROCESSOR, SIGHTS, PreparedImage
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import ImageTexts
from tokenpod.service.images.headers import Header
from tokenpod.service.images.image_checks import check_images
from tokenpod.service.images.image_text import ImageTokens
from tokenpod.service.images.image_workers import ImageWorkers, TensorFile

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
