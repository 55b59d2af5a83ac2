"""Images as a call has them: encoded bytes, which nobody has looked into yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a request.

    Args:
        data: the file's bytes; empty, with a `uri`.
        field: where the client put it, for errors.
        uri: where they are to be fetched from.
    """

    data: bytes
    field: str
    uri: str = ""


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor as a client describes it: nothing of it is known to be true.

    Args:
        dtype: its name.
        shape: of whatever length.
        data: its bytes.
    """

    dtype: str
    shape: Sequence[int]
    data: bytes


@dataclass(frozen=True, slots=True)
class GivenTensors:
    """Images of a request whose prompt has their tokens, as tensors for the model's tower.

    Args:
        tensors: by the name of the tower's argument, of all images together.
        places: of each image its first place in the prompt, and how many it has.
        field: where the client put them, for errors.
    """

    tensors: Mapping[str, GivenTensor]
    places: Sequence[tuple[int, int]]
    field: str

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())


def image_bytes(images: Sequence[GivenImage], most: int) -> int:
    """Bytes of their files; `most`: of one that is to be fetched."""
    return sum(most if image.uri else len(image.data) for image in images)
