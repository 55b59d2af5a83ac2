"""From token ids to text, one token at a time, equal to what the library decodes of all of them.

One difference: in a run of byte tokens that is no valid UTF-8 as a whole, the characters that are
whole stay (see `_SentencePieceDetokenizer`).

How a tokenizer decodes is read from its `tokenizer.json`. The two kinds that nearly every model
uses (byte-level BPE, and SentencePiece's pieces with or without byte fallback) are decoded from a
table of pieces, filled as ids are met: a push then costs well under a microsecond. Any other
decoder is asked itself, over a window of recent tokens.

Special tokens and ids outside the vocabulary decode to nothing; tokens that were added and aren't
special decode as the vocabulary's do. Spaces before punctuation are never cleaned up
(`clean_up_tokenization_spaces`): that would change text which was already sent.
"""

from __future__ import annotations

import json
import re
from codecs import register_error, utf_8_decode
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from tokenizers import Tokenizer as Backend

from tokenpod.service.text.tokenizers.decoding import Decoding, Detokenizer, Pieces

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_WINDOW_CONTEXT = 5  # tokens
_WINDOW_HELD = 16  # tokens
#: An error handler of codecs: one U+FFFD for each byte that is part of no character.
_REPLACE_BYTES = "tokenpod.replace_bytes"


def _replacements(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


register_error(_REPLACE_BYTES, _replacements)


def decoding_of(backend: Backend, special_ids: frozenset[int]) -> Decoding:
    """Return the decoding that `backend`'s decoder asks for, with `special_ids` left out."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return _ByteLevel(backend, special_ids)
    if kinds == ["Metaspace"]:
        return _SentencePiece.of_metaspace(backend, special_ids, steps[0])
    if _is_sentencepiece(steps):
        return _SentencePiece.of_steps(backend, special_ids, steps)
    return _Windowed(backend, special_ids)


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Whether `steps` are Replace*, ByteFallback?, then Fuse? or Fuse and Strip of leading text."""
    kinds = "".join(
        {"Replace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}.get(step["type"], "?")
        for step in steps
    )
    return (
        re.fullmatch("R+B?(FS?)?", kinds) is not None
        and all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
        and all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    )


# --- byte-level BPE -------------------------------------------------------------------------


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_piece(token: str) -> str | bytes:
    """Return the token's text, or its bytes where they aren't whole characters.

    A token with a character outside the alphabet (added tokens can have one) stands for itself.
    """
    try:
        raw = bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class _ByteLevel(Decoding):
    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        super().__init__(backend, special_ids)
        self._pieces = Pieces[str | bytes](backend, special_ids, "", _byte_level_piece)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; b'' outside the vocabulary."""
        piece = self._pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def _plain_text(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        return _ByteLevelDetokenizer(self._pieces)


class _ByteLevelDetokenizer(Detokenizer):
    def __init__(self, pieces: Pieces[str | bytes]) -> None:
        self._pieces = pieces
        self._incomplete = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._incomplete:
                return piece
            piece = piece.encode()
        raw = self._incomplete + piece
        text, consumed = utf_8_decode(raw, "replace", False)
        self._incomplete = raw[consumed:]
        return text

    def finish(self) -> str:
        text = self._incomplete.decode(errors="replace")
        self._incomplete = b""
        return text


# --- SentencePiece --------------------------------------------------------------------------


class _SentencePiece(Decoding):
    """Pieces of text, and tokens such as `<0x0A>` that stand for one byte.

    `opening` makes the piece of a sequence's first token, where a decoder treats it apart, and
    `strip` are the characters removed where the text begins: both only if no text precedes.
    """

    def __init__(
        self,
        backend: Backend,
        special_ids: frozenset[int],
        piece: Callable[[str], str | bytes],
        opening: Callable[[str], str | bytes] | None = None,
        strip: str = "",
    ) -> None:
        super().__init__(backend, special_ids)
        self._pieces = Pieces[str | bytes | None](backend, special_ids, None, piece)
        self._openings = (
            self._pieces
            if opening is None
            else Pieces[str | bytes | None](backend, special_ids, None, opening)
        )
        self._strip = strip

    @classmethod
    def of_metaspace(
        cls, backend: Backend, special_ids: frozenset[int], step: dict[str, Any]
    ) -> _SentencePiece:
        mark = step["replacement"]
        opens = step["prepend_scheme"] != "never"
        return cls(
            backend,
            special_ids,
            piece=lambda token: token.replace(mark, " "),
            opening=(lambda token: token.replace(mark, "")) if opens else None,
        )

    @classmethod
    def of_steps(
        cls, backend: Backend, special_ids: frozenset[int], steps: list[dict[str, Any]]
    ) -> _SentencePiece:
        replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace"
        ]
        byte_fallback = any(step["type"] == "ByteFallback" for step in steps)

        def piece(token: str) -> str | bytes:
            for pattern, content in replacements:
                token = token.replace(pattern, content)
            match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
            return token if match is None else bytes.fromhex(match[1])

        strip = "".join(
            step["content"] * step["start"] for step in steps if step["type"] == "Strip"
        )
        return cls(backend, special_ids, piece=piece, strip=strip)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, with a space that a text's beginning loses."""
        piece = self._pieces[token_id]
        return piece if isinstance(piece, bytes) else (piece or "").encode()

    def _plain_text(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        return piece.decode(errors="replace") if isinstance(piece, bytes) else piece or ""

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        continues = any(self._pieces[token_id] is not None for token_id in reversed(prompt_ids))
        if continues:
            return _SentencePieceDetokenizer(self._pieces, self._pieces, "")
        return _SentencePieceDetokenizer(self._openings, self._pieces, self._strip)


class _SentencePieceDetokenizer(Detokenizer):
    """Text as it comes: a piece at once, byte tokens once they make a character.

    A byte that is part of no character becomes one U+FFFD, as SentencePiece itself decodes. The
    decoder of `tokenizers` makes U+FFFD of every byte of such a run, whole characters included, so
    that no byte token would have a text before its run is over: a stream would come late, and a
    stop sequence such as a newline, `<0x0A>`, would be found after the token that completes it.
    """

    def __init__(
        self,
        openings: Pieces[str | bytes | None],
        pieces: Pieces[str | bytes | None],
        strip: str,
    ) -> None:
        self._current = openings
        self._pieces = pieces
        self._strip = strip
        #: The beginning of a character.
        self._incomplete = b""

    def push(self, token_id: int) -> str:
        piece = self._current[token_id]
        if piece is None:
            return ""
        self._current = self._pieces
        if isinstance(piece, bytes):
            raw = self._incomplete + piece
            text, consumed = utf_8_decode(raw, _REPLACE_BYTES, False)
            self._incomplete = raw[consumed:]
        else:
            text = self._give_up() + piece if self._incomplete else piece
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        return self._stripped(self._give_up())

    def _give_up(self) -> str:
        """The text of a character that was not completed."""
        text = _REPLACEMENT * len(self._incomplete)
        self._incomplete = b""
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip[0]:
                self._strip = ""
                break
            text, self._strip = text[1:], self._strip[1:]
        return text


# --- any other decoder ----------------------------------------------------------------------


class _Windowed(Decoding):
    def __init__(self, backend: Backend, special_ids: frozenset[int]) -> None:
        super().__init__(backend, special_ids)
        self._known = Pieces[bool](backend, special_ids, False, lambda token: True)

    def _plain_text(self, token_id: int) -> str:
        return (
            self._backend.decode([token_id], skip_special_tokens=False)
            if self._known[token_id]
            else ""
        )

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        latest = (token_id for token_id in reversed(prompt_ids) if self._known[token_id])
        context = list(islice(latest, _WINDOW_CONTEXT))[::-1]
        return _WindowedDetokenizer(self._backend, self._known, context)


class _WindowedDetokenizer(Detokenizer):
    """The difference that each token makes to the text of a window of tokens.

    The window is the tokens that the last text came from, and those since. Text that ends with
    U+FFFD may be an incomplete character and waits, but not for ever.
    """

    def __init__(self, backend: Backend, known: Pieces[bool], context: list[int]) -> None:
        self._backend = backend
        self._known = known
        self._window = context
        self._read = len(context)
        self._before = self._text(context)

    def push(self, token_id: int) -> str:
        if not self._known[token_id]:
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        held = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and held < _WINDOW_HELD:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._text(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._before) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._before = self._text(self._window)
        return new

    def _text(self, ids: list[int]) -> str:
        # Those that text is not to show are not among them.
        return self._backend.decode(ids, skip_special_tokens=False)
