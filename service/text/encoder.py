"""Prompts to token ids: short texts at once, everything else in a worker process.

A short text is tokenised on the event loop, so that its first token does not wait for another
process. A long text would block all streams, and the cost of a chat depends on its template, which
is a program. Both go to the text workers, which can be killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenpod.core.constraints import Tagged
from tokenpod.service.calls.call import Prompt
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.image_reader import ImageReader, SeenImage
from tokenpod.service.text.parsers.calls import CallFormat
from tokenpod.service.text.tokenizers.generation_defaults import read_defaults
from tokenpod.service.text.tokenizers.inline_cost import is_bounded
from tokenpod.service.text.tokenizers.tokenizer import (
    TextModel,
    Tokenizer,
    TokenizerError,
    TokenizerPanic,
)
from tokenpod.service.text.workers.text_messages import EncodeChat, EncodeTexts, Text, unpacked
from tokenpod.service.text.workers.text_workers import TextWorkers
from tokenpod.service.workers.worker_pool import CantStart

#: Bytes of UTF-8 up to which texts are tokenised on the event loop (benchmarks/NOTES.md).
INLINE_BYTES = 4096
#: What a text costs besides its length, in bytes.
_TEXT_BYTES = 20
#: Short texts of a batch share a job up to so many bytes, since each job is a message both ways.
_SHARED_JOB_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt's number of tokens, and the last of their ids: as many as were to be kept.

    `offsets`: of those, begin and end in the text in turn, in code points; empty if not asked for.
    `rendered_end`: what the text of a chat ends with. `calls`: how its tools may be called, where
    that was asked for.
    """

    count: int
    ids: list[int]
    offsets: list[int] = field(default_factory=list)
    rendered_end: str = ""
    calls: Tagged | None = None


class Encoder:
    """Tokenises prompts: short texts itself, long ones and chats in `workers`.

    `folder`: the model's, where the tokenizer came from; `defaults`: of that folder, how tokens are
    chosen where a request leaves that open.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        workers: TextWorkers,
        folder: Path,
        defaults: Mapping[str, Any] | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        #: None: images are refused.
        self.images = images
        self.folder = folder
        self.defaults = defaults or {}
        self._workers = workers
        self._inline_bytes = INLINE_BYTES if is_bounded(tokenizer.backend) else 0

    @classmethod
    async def start(cls, folder: Path, settings: ServerSettings, life: AsyncExitStack) -> Encoder:
        """Load a model's tokenizer here and in workers that end with `life`.

        Raises TokenizerError.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder, settings.chat_template)
        defaults = read_defaults(folder) if settings.generation_config == "model" else {}
        model = await asyncio.to_thread(tokenizer.text_model)
        workers = await TextWorkers.start(model, settings)
        life.push_async_callback(workers.close)
        try:
            name_of = tokenizer.backend.id_to_token
            images = await ImageReader.start(folder, settings, name_of, life)
        except CantStart as error:
            raise TokenizerError(f"the model's images can't be read: {error}") from error
        return cls(tokenizer, workers, folder, defaults, images)

    def text_model(self) -> TextModel:
        """The tokenizer's file and chat template, as the workers have them; takes a moment."""
        return self._workers.model()

    async def encode(
        self,
        prompt: Prompt,
        *,
        keep: int,
        special: bool = True,
        offsets: bool = False,
        calls: CallFormat | None = None,
        images: Sequence[SeenImage] = (),
    ) -> Tokenised:
        """A prompt's tokens; of a chat, those of what the model's template makes of it.

        Args:
            prompt: what is to be encoded.
            keep: how many ids are returned, the last ones.
            special: add special tokens to a text.
            offsets: say where the tokens of a text begin and end.
            calls: make a constraint of a chat's tools, which are called in this format.
            images: those of a chat.

        Raises:
            InvalidArgument: the template refuses it, or it takes too much time or memory.
        """
        if isinstance(prompt, ChatPrompt):
            return await self._encode_chat(prompt, keep, calls, images)
        if isinstance(prompt, str):
            if _size(prompt) <= self._inline_bytes:
                return self._at_once(prompt, "text", special=special, keep=keep, offsets=offsets)
            text = Text(prompt, special, keep, offsets)
            return (await self._in_worker([text], "text"))[0]
        ids = list(prompt or ())
        return Tokenised(len(ids), _last(ids, keep))

    async def encode_all(
        self, texts: Sequence[Text], *, field: str
    ) -> list[Tokenised | InvalidArgument]:
        """The tokens of each text, or what is wrong with it alone, which `field` names."""
        if sum(_size(each.text) for each in texts) <= self._inline_bytes:
            return [self._at_once_or_not(text, field) for text in texts]
        groups = _grouped(texts)
        done = await asyncio.gather(
            *(self._group(group, field) for group in groups), return_exceptions=True
        )
        results: list[Tokenised | InvalidArgument] = []
        for part in done:
            if isinstance(part, BaseException):
                raise part
            results += part
        return results

    def _at_once(
        self,
        text: str,
        field: str,
        *,
        special: bool,
        keep: int,
        offsets: bool,
        first: bool = False,
    ) -> Tokenised:
        found: list[int] = []
        try:
            if offsets:
                encode = self.tokenizer.encode_offsets
                ids, found = encode(text, add_special_tokens=special)
            else:
                ids = self.tokenizer.encode(text, add_special_tokens=special)
        except TokenizerPanic as error:
            raise InvalidArgument(field, "makes the model's tokenizer fail") from error
        kept = ids[:keep] if first else _last(ids, keep)
        return Tokenised(len(ids), kept, _last(found, 2 * keep))

    def _at_once_or_not(self, text: Text, field: str) -> Tokenised | InvalidArgument:
        try:
            return self._at_once(
                text.text,
                field,
                special=text.special,
                keep=text.keep,
                offsets=text.offsets,
                first=text.first,
            )
        except InvalidArgument as problem:
            return problem

    async def _group(
        self, texts: Sequence[Text], field: str
    ) -> Sequence[Tokenised | InvalidArgument]:
        try:
            return await self._in_worker(texts, field)
        except InvalidArgument as problem:
            if len(texts) == 1:
                return [problem]
        # One of them is at fault: the others are not to suffer for it.
        return [result for text in texts for result in await self._group([text], field)]

    async def _in_worker(self, texts: Sequence[Text], field: str) -> list[Tokenised]:
        size = sum(_size(each.text) for each in texts)
        encoded = await self._workers.run(EncodeTexts(list(texts)), field=field, size=size)
        return [
            Tokenised(count, unpacked(ids), unpacked(offsets))
            for count, ids, offsets in zip(
                encoded.counts, encoded.ids, encoded.offsets, strict=True
            )
        ]

    async def _encode_chat(
        self,
        chat: ChatPrompt,
        keep: int,
        calls: CallFormat | None,
        images: Sequence[SeenImage],
    ) -> Tokenised:
        texts = self.images.texts(images) if self.images is not None else None
        job = EncodeChat(chat, keep, calls.name if calls is not None else "", texts)
        encoded = await self._workers.run(job, field="chat", size=chat.characters)
        ids, end = unpacked(encoded.ids[0]), encoded.rendered_end
        return Tokenised(encoded.counts[0], ids, rendered_end=end, calls=encoded.calls)


def _size(text: str) -> int:
    """About what a text costs, in bytes."""
    # Counting a long text's bytes would copy it: a character has at most four.
    short = len(text) <= INLINE_BYTES and not text.isascii()
    return (len(text.encode()) if short else len(text)) + _TEXT_BYTES


def _last(ids: list[int], keep: int) -> list[int]:
    return ids if keep >= len(ids) else ids[len(ids) - keep :]


def _grouped(texts: Sequence[Text]) -> list[list[Text]]:
    """The texts in order, cut where a job would become too large."""
    groups: list[list[Text]] = []
    room = 0
    for text in texts:
        size = _size(text.text)
        if size > room:
            groups.append([])
            room = _SHARED_JOB_BYTES
        groups[-1].append(text)
        room -= size
    return groups
