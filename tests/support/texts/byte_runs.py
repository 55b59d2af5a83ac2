"""What detokenizers make of runs of byte tokens, computed by another way."""

from __future__ import annotations

import contextlib
import itertools
import re

from tokenizers import Tokenizer as Backend


def known(backend: Backend, ids: list[int]) -> list[int]:
    """What the library decodes to the text of `ids`.

    Ids beyond the vocabulary and special tokens are left out. In runs of byte tokens each byte that
    is part of no character has become U+FFFD, as SentencePiece decodes: the library would replace
    the whole run.
    """
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    tokens = [(i, backend.id_to_token(i)) for i in ids if i not in special]
    found: list[int] = []
    for is_byte, group in itertools.groupby(
        [each for each in tokens if each[1] is not None],
        key=lambda each: re.fullmatch("<0x..>", each[1]) is not None,
    ):
        run = list(group)
        if is_byte:
            raw = b"".join(bytes.fromhex(token[3:5]) for _, token in run)
            found += ids_of_bytes(backend, with_replacements(raw))
        else:
            found += [token_id for token_id, _ in run]
    return found


def with_replacements(raw: bytes) -> bytes:
    """UTF-8 whose whole characters are those of `raw`, with U+FFFD for each byte between them."""
    out, at = b"", 0
    while at < len(raw):
        for size in range(1, 5):
            with contextlib.suppress(UnicodeDecodeError):
                out += raw[at : at + size].decode().encode()
                at += size
                break
        else:
            out, at = out + "\ufffd".encode(), at + 1
    return out


def ids_of_bytes(backend: Backend, raw: bytes) -> list[int]:
    return [backend.token_to_id(f"<0x{byte:02X}>") for byte in raw]
