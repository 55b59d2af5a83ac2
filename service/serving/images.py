"""Images of calls, from their bytes to rows that the engine keeps for a request."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.core.requests import ImageRows
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod.service.calls.images import GivenImage, GivenTensors
from tokenpod.service.images.image_reader import ImageReader, SeenImage, close_all
from tokenpod.service.pod.client import EngineClient


class Images:
    """Reads images, and has the engine compute their rows.

    Args:
        reader: of the model's; None: it sees none.
        client: the engine's.
    """

    def __init__(self, reader: ImageReader | None, client: EngineClient) -> None:
        self._reader, self._client = reader, client

    @property
    def served(self) -> bool:
        """Whether the model sees."""
        return self._reader is not None

    @property
    def fetched(self) -> bool:
        """Whether images may be named by URL."""
        return self._reader is not None and self._reader.urls is not None

    def bytes_of(self, images: Sequence[GivenImage]) -> int:
        """Of their files, at most."""
        return self._reader.bytes_of(images) if self._reader is not None else 0

    def check(self, images: Sequence[GivenImage]) -> None:
        """All that can be said at once. Raises InvalidArgument or Unimplemented."""
        if images:
            self._reading(images).check(images)

    async def read(self, images: Sequence[GivenImage]) -> SeenImages:
        """How many tokens stand for each. `close` what is returned.

        Raises InvalidArgument, which names the image, or Unavailable.
        """
        if not images:
            return SeenImages([], None, self._client)
        reader = self._reading(images)
        return SeenImages(await reader.read(images), reader, self._client)

    async def read_tensors(self, given: GivenTensors, prompt: Sequence[int]) -> SeenImages:
        """Of a prompt that has their tokens. `close` what is returned.

        Raises InvalidArgument, which names the tensor.
        """
        if self._reader is None:
            problem = "is not supported: this server has no model that sees"
            raise InvalidArgument(given.field, problem)
        seen = await self._reader.check_tensors(given, prompt)
        return SeenImages(seen, self._reader, self._client)

    def _reading(self, images: Sequence[GivenImage]) -> ImageReader:
        if self._reader is None:
            field = images[0].field.removesuffix(".data").removesuffix(".uri")
            raise Unimplemented(field, "is not supported: this server has no model that sees")
        return self._reader


class SeenImages:
    """The images of a call, read.

    Args:
        images: as they are in the prompt, in order.
        reader: reads them again if the engine has forgotten their rows; None: there are none.
        client: the engine's.
    """

    def __init__(
        self, images: Sequence[SeenImage], reader: ImageReader | None, client: EngineClient
    ) -> None:
        self.images = images
        self._reader, self._client = reader, client
        #: Of rows that the engine keeps until a request asks for them.
        self._op: int | None = None
        #: The engine has yet to open their files: it is not ours to close them.
        self._lent = self._over = False

    def within(self, text: str, places: Sequence[int], field: str) -> str:
        """A text with these images at these offsets. Raises InvalidArgument; see `ImageTokens`."""
        if self._reader is None:
            return text
        layouts = [image.layout for image in self.images]
        return self._reader.tokens.within(text, places, layouts, field)

    @property
    def file_bytes(self) -> int:
        """Of the tensors of those that were not seen before."""
        return sum(image.file.size for image in self.images if image.file is not None)

    async def encoded(self, prompt: Sequence[int]) -> ImageRows | None:
        """Where in a prompt they are, once the engine has their rows; None: there are none.

        Raises InvalidArgument if the prompt has not all of their tokens, Unavailable or Internal.
        """
        if self._reader is None:
            return None
        runs = self._reader.tokens.runs(prompt, [image.rows for image in self.images])
        while True:
            self._lent = True
            prepared = [image.prepared for image in self.images]
            op, missing = await self._client.encode_images(prepared, self._returned)
            if not missing:
                break
            # Once, of an image that is there twice.
            for image in {image.key: image for image in self.images}.values():
                if image.key in missing:
                    await self._reader.decode(image)
        self._op = op
        close_all(self.images)
        return ImageRows(op, runs)

    def close(self) -> None:
        """No request will ask for their rows; one may have done so."""
        if self._op is not None:
            self._client.drop_images(self._op)
            self._op = None
        self._over = True
        if not self._lent:
            close_all(self.images)

    def _returned(self) -> None:
        self._lent = False
        if self._over:
            close_all(self.images)
