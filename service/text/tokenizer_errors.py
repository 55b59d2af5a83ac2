"""What can go wrong with a model's tokenizer, apart from its templates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class TokenizerError(Exception):
    """A folder's tokenizer can't be used; one line that names the file."""


class TokenizerPanic(Exception):
    """The tokenizer's library has panicked on a text; the text says where."""


@contextlib.contextmanager
def panics_named() -> Iterator[None]:
    """A panic of the library becomes a TokenizerPanic: it is a BaseException, and would pass by
    all that answers calls."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerPanic(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """What `error` says, or else its kind."""
    return " ".join(str(error).split()) or type(error).__name__
