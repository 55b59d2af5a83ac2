"""How images stand in a prompt: which token has a row of one each time, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenpod.core.images import SIGHTS
from tokenpod.core.requests import ImageRun
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.images.expansions import ImageTexts, no_token


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
