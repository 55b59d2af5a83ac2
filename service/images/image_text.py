"""How images stand in a prompt: which token has a row of one each time, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenpod.core.images import SIGHTS
from tokenpod.core.requests import ImageRun
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.images.expansions import ImageTexts, Layout, no_token


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
            found = [config[name] for name in fields if isinstance(config.get(name), int)]
            return [name_of(each) or "" for each in found]

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
