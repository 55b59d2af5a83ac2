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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenpod.core.images import SIGHTS, PreparedImage, processor_of
from tokenpod.service.calls.errors import Unimplemented
from tokenpod.service.calls.images import GivenImage, GivenTensors, image_bytes
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import ImageTexts, Layout, rows_of
from tokenpod.service.images.given_tensors import check_tensors
from tokenpod.service.images.image_checks import check_count, check_image
from tokenpod.service.images.image_text import ImageTokens
from tokenpod.service.images.image_workers import ImageWorkers, TensorFile

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
