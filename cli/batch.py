"""`tokenpod batch`: a file of prompts, and a file of answers in their order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import grpc

from tokenpod_client import AsyncClient
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import RemoteError, client_of
from tokenpod_client.cli.terminal import json_line
from tokenpod_client.errors import ServerError
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GenerateOnceResponse
from tokenpod_client.requests import Prompt, flat, generate_request

#: Bytes of a line, at most.
_MOST_LINE_BYTES = 64 * 1024 * 1024
#: Where a prompt is in a line; one of them.
_PROMPTS = ("prompt", "token_ids", "messages")
#: Answers that are kept, or awaited, behind the first one that is not there: of each at once.
_AHEAD = 8
#: How often a prompt is sent at most: where a server is full or restarts, that is some minutes.
_ATTEMPTS = 60
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of a file."""

    prompt: Prompt
    options: dict[str, Any]
    #: What the line calls itself; None: nothing.
    name: Any = None


def read_lines(path: Path, given: Mapping[str, Any]) -> Iterator[Line]:
    """The prompts of a file, and what each asks for: what its line says, or else `given`.

    Raises RemoteError that names the line for one that can't be sent.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(_MOST_LINE_BYTES + 1):
            number += 1
            if not text.strip():
                continue
            try:
                if len(text) > _MOST_LINE_BYTES:
                    raise ValueError(f"has more than {_MOST_LINE_BYTES} bytes")
                yield _line(json.loads(text), given)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise RemoteError(f"{path}, line {number}: {error}") from None


def _line(found: Any, given: Mapping[str, Any]) -> Line:
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    prompts = [name for name in _PROMPTS if name in found]
    if len(prompts) != 1:
        raise ValueError(f"has {len(prompts)} of {', '.join(_PROMPTS)}; it must have one")
    options = {**given, **flat(found)}
    prompt, name = options.pop(prompts[0]), options.pop("id", None)
    if not isinstance(prompt, str if prompts[0] == "prompt" else list):
        raise ValueError(f"{prompts[0]} is {str(prompt)[:80]!r}")
    generate_request(prompt, **options)  # a line that can't be sent is found before anything is
    return Line(prompt, options, name)


@dataclass
class Progress:
    """How far it has come, on `notes`; as it goes where that is a terminal."""

    total: int
    notes: TextIO = field(default_factory=lambda: sys.stderr)
    done: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    _began: float = field(default_factory=time.monotonic)
    _told: float = 0.0

    def note(self, answer: GenerateOnceResponse | None) -> None:
        """One more answer; None: an error."""
        self.done += 1
        if answer is None:
            self.failed += 1
        else:
            self.tokens_in += answer.usage.prompt_token_count
            self.tokens_out += answer.usage.generated_token_count
        now = time.monotonic()
        if self.notes.isatty() and now - self._told > _PROGRESS_SECONDS:
            self._told = now
            self.notes.write(f"{self._begin}{self}")
            self.notes.flush()

    @property
    def _begin(self) -> str:
        """Of a line that takes the place of one before it."""
        return "\r\x1b[K" if self._told else ""

    def close(self) -> None:
        """The closing line."""
        print(f"{self._begin}[{self}]", file=self.notes, flush=True)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        return (
            f"{self.done:,} of {self.total:,} prompts, {self.failed:,} failed; "
            f"{self.tokens_in:,} tokens in, {self.tokens_out:,} out: "
            f"{self.tokens_in / seconds:,.1f} and {self.tokens_out / seconds:,.1f} tokens/s"
        )


async def batch(
    remote: Remote, prompts: Path, answers: Path | None, given: Mapping[str, Any], *, at_once: int
) -> bool:
    """Answer every line, so many at once; whether none failed.

    Each answer is a line of JSON in the order of the prompts: `index` from 0, the line's `id`, and
    what GenerateOnce returns, or `error` with a code and a message. Raises RemoteError for a line
    that can't be sent, before any is, and where the server can't be reached.

    Args:
        answers: a file that is not there yet; None: standard output.
        given: options of each prompt whose line does not say otherwise.
    """
    progress = Progress(sum(1 for _ in read_lines(prompts, given)))
    async with client_of(remote, attempts=_ATTEMPTS) as client:
        await _reach(client, remote)
        with _opened(answers) as out:
            turns, awaited = asyncio.Semaphore(at_once), deque[asyncio.Task[str]]()
            try:
                for index, line in enumerate(read_lines(prompts, given)):
                    task = _answer(client, index, line, turns, progress)
                    awaited.append(asyncio.create_task(task))
                    while len(awaited) >= at_once * _AHEAD or (awaited and awaited[0].done()):
                        print(await awaited.popleft(), file=out)
                while awaited:
                    print(await awaited.popleft(), file=out)
            finally:
                for left in awaited:
                    left.cancel()
                await asyncio.gather(*awaited, return_exceptions=True)
    progress.close()
    return not progress.failed


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    """Where answers go. What was there is not written over."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("x", encoding="utf-8")
    except OSError as error:
        raise RemoteError(f"ANSWERS is {path}: {error.strerror}") from error
    with file:
        yield file


async def _reach(client: AsyncClient, remote: Remote) -> None:
    """A server that is not there fails once, and not every line."""
    try:
        await client.model(deadline=remote.deadline or 60)
    except ServerError as error:
        raise RemoteError(f"{remote.address}: {error}") from error


async def _answer(
    client: AsyncClient, index: int, line: Line, turns: asyncio.Semaphore, progress: Progress
) -> str:
    about = {"index": index} | ({} if line.name is None else {"id": line.name})
    async with turns:
        try:
            answer = await client.generate_once(line.prompt, **line.options)
        except ServerError as error:
            if error.code is grpc.StatusCode.UNAUTHENTICATED:
                raise RemoteError(str(error)) from error
            progress.note(None)
            problem = {"code": error.code.name, "message": error.message}
            return json.dumps({**about, "error": problem}, ensure_ascii=False)
    progress.note(answer.response)
    return json_line(answer.response, **about)
