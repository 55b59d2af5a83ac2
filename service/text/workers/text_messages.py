"""What crosses between a front end and its text workers: msgpack frames, as with the engine.

Token ids travel as the bytes of an array of 32-bit numbers, and only those that the caller needs:
unpacking a million Python integers would hold the event loop for 20 ms.
"""

from __future__ import annotations

from array import array

import msgspec

from tokenpod.core.constraints import Tagged
from tokenpod.core.message import Message
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.images.expansions import ImageTexts
from tokenpod.service.workers.worker import Loaded, Refused

#: `array`'s letter for token ids, and bytes of one.
_ID = "I"


class WorkerOptions(Message, frozen=True, array_like=True, tag=True):
    """The first message to a new worker.

    Args:
        model: descriptor of a file that holds a `TextModel`.
        memory_bytes: what the worker may take on top of what it has once the model is loaded.
    """

    model: int
    memory_bytes: int


class Text(msgspec.Struct, frozen=True, array_like=True):
    """A text to tokenise.

    Args:
        text: the text.
        special: whether to add special tokens.
        keep: how many ids are returned, the last ones; the number of tokens always is.
        offsets: return where each of them begins and ends, too.
        first: the first ids are returned, not the last; without offsets.
    """

    text: str
    special: bool
    keep: int
    offsets: bool = False
    first: bool = False


class EncodeTexts(Message, frozen=True, array_like=True, tag=True):
    """Tokenise texts."""

    texts: list[Text]


class EncodeChat(Message, frozen=True, array_like=True, tag=True):
    """Render a conversation with the model's template, and tokenise the result.

    Args:
        chat: the conversation.
        keep: as a text's.
        call_format: name of the format in which the model writes calls, to make a constraint of
            the chat's tools; "": none is wanted.
        images: what stands for its images; None: the model sees none.
    """

    chat: ChatPrompt
    keep: int
    call_format: str = ""
    images: ImageTexts | None = None


class Encoded(Message, frozen=True, array_like=True, tag=True):
    """The number of tokens of each text, and the last of them as packed ids.

    `offsets`, where asked for: the begin and end of each of those tokens in turn, packed likewise.
    `rendered_end`: of a chat, what the template's text ends with. `calls`: how its tools may be
    called, where that was asked for.
    """

    counts: list[int]
    ids: list[bytes]
    offsets: list[bytes]
    rendered_end: str = ""
    calls: Tagged | None = None


Job = EncodeTexts | EncodeChat
ToWorker = WorkerOptions | EncodeTexts | EncodeChat
FromWorker = Loaded | Encoded | Refused


def packed(ids: list[int]) -> bytes:
    """Token ids as bytes, in this machine's order: both ends are on it."""
    return array(_ID, ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Token ids of what `packed` has made."""
    return array(_ID, data).tolist()
