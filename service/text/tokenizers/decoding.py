"""The interface of all decodings, a detokenizer per sequence, and their table of pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenizers import Tokenizer as Backend

_Piece = TypeVar("_Piece")


class Detokenizer(ABC):
    """The text of one sequence, token by token."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes: whole characters only, often none."""

    @abstractmethod
    def finish(self) -> str:
        """Return what is held back; an incomplete character becomes U+FFFD. The last call."""


class Spaced(Detokenizer):
    """Puts a space between special tokens and what is beside them.

    Args:
        inner: decodes special tokens too.
        special_ids: which they are.
    """

    def __init__(self, inner: Detokenizer, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids
        self._begun = False
        self._after_special = False

    def push(self, token_id: int) -> str:
        """As the inner one, with a space before a special token and behind it."""
        special = token_id in self._special_ids
        text = self._inner.push(token_id)
        apart = self._begun and (special or self._after_special)
        self._begun, self._after_special = self._begun or bool(text), special
        return f" {text}" if apart and text else text

    def finish(self) -> str:
        """As the inner one."""
        return self._inner.finish()


class Decoding(ABC):
    """What the sequences of one tokenizer share: how its ids become text.

    Args:
        backend: the tokenizer.
        special_ids: text never shows these tokens.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, special or not; '' outside the vocabulary."""
        if token_id in self._special_ids:
            return self._backend.id_to_token(token_id) or ""
        return self._plain_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return what one token that is not special adds to a text; None: that depends on others.

        b'' outside the vocabulary.
        """
        return None

    @abstractmethod
    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for what follows `prompt_ids`."""

    @abstractmethod
    def _plain_text(self, token_id: int) -> str:
        """Return the text of one token that is not special."""


class Pieces(dict[int, _Piece]):
    """What each token contributes, made when an id is first met: nothing to build at start."""

    def __init__(
        self,
        backend: Backend,
        skipped: frozenset[int],
        empty: _Piece,
        make: Callable[[str], _Piece],
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._empty = empty
        self._make = make

    def __missing__(self, token_id: int) -> _Piece:
        token = None if token_id < 0 else self._backend.id_to_token(token_id)
        if token is None:
            return self._empty  # not kept, so that the table can't outgrow the vocabulary
        piece = self._empty if token_id in self._skipped else self._make(token)
        self[token_id] = piece
        return piece
