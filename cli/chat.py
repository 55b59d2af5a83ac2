"""`tokenpod chat`: a conversation in the terminal.

Lines are edited by readline, where Python has it. Ctrl-C ends an answer, which stays in the
conversation as far as it came; Ctrl-D ends the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from tokenpod_client.chats import Message
from tokenpod_client.cli import commands
from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import RemoteError, connected
from tokenpod_client.cli.terminal import finish_text
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

HELP = """\
/new            begin a new conversation
/system TEXT    begin a new one with this system message
/quit           leave, as Ctrl-D does
A \\ at the end of a line goes on in the next one; so does all between two lines of \"\"\".
Ctrl-C ends an answer."""
_PROMPT, _MORE = "> ", ". "
_BLOCK = '"""'
#: What a model thinks is shown darker than what it says.
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Leave(Exception):
    """The user has."""


class Conversation:
    """The turns so far, and what makes one more of them.

    Args:
        remote: the server.
        options: what all turns ask for, as options of the Python client.
    """

    def __init__(self, remote: Remote, options: Mapping[str, Any]) -> None:
        self._remote = remote
        self._options = options
        self._messages: list[Message] = []
        self._colours = sys.stdout.isatty()
        self._reasons = False

    def begin(self, system: str | None) -> None:
        """Forget all turns."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """The user's turn, and the model's as it comes. Without an answer neither has been."""
        self._messages.append({"role": "user", "content": text})
        answer = {"role": "assistant", "content": "", "reasoning": ""}
        turn: list[Message] = [answer]
        try:
            asyncio.run(self._answer(answer, turn))
        except KeyboardInterrupt:
            self._write("\n[interrupted]\n", reasons=False)
        except RemoteError as error:
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
        if len(turn) > 1 or answer["content"] or answer["reasoning"]:
            self._messages.append(turn[-1])
        else:
            del self._messages[-1]

    async def _answer(self, answer: dict[str, str], turn: list[Message]) -> None:
        """Show the next turn; note in `answer` how far it has come, and add it whole to `turn`."""
        async with (
            connected(self._remote) as client,
            client.generate(self._messages, **self._options) as stream,
        ):
            async for delta in stream:
                answer["reasoning"] += delta.reasoning
                answer["content"] += delta.text
                self._write(delta.reasoning, reasons=True)
                self._write(delta.text, reasons=False)
            finished = stream.finished[0]
            self._close(finished)
            turn.append(finished.message)

    def _close(self, finished: pb.Finished) -> None:
        ended = finished.finish_reason != pb.FINISH_REASON_EOS_TOKEN
        self._write(f"\n[{finish_text(finished)}]\n" if ended else "\n", reasons=False)

    def _write(self, text: str, *, reasons: bool) -> None:
        if not text:
            return
        if reasons != self._reasons:
            self._reasons = reasons
            between = "" if reasons or text.startswith("\n") else "\n"
            colour = _DIM if reasons else _PLAIN
            text = f"{colour if self._colours else ''}{between}{text}"
        sys.stdout.write(text)
        sys.stdout.flush()


def talk(remote: Remote, options: Mapping[str, Any], system: str | None) -> None:
    """Let the user talk with the model until they leave. Raises RemoteError if there is none."""
    with contextlib.suppress(ImportError):
        # input() lets it edit lines and remember them, once it is there.
        import readline  # noqa: F401
    model = asyncio.run(commands.ask_model(remote))
    if not model.HasField("chat_template"):
        raise RemoteError(f"{model.name} has no chat template: use tokenpod generate")
    if sys.stdin.isatty():
        print(f"{model.name} at {remote.address}; /help says what else there is.")
    conversation = Conversation(remote, options)
    conversation.begin(system)
    while True:
        try:
            _turn(conversation, _read())
        except KeyboardInterrupt:
            print("\n[Ctrl-D leaves]")
        except (EOFError, Leave):
            return


def _turn(conversation: Conversation, text: str) -> None:
    command, _, rest = text.partition(" ")
    match command:
        case "/quit":
            raise Leave
        case "/new":
            conversation.begin(None)
        case "/system":
            conversation.begin(rest.strip())
        case _ if command.startswith("/"):
            print(HELP)
        case _ if text.strip():
            conversation.say(text)


def _read() -> str:
    """What the user says, of one line or several. Raises EOFError at the end of the input."""
    line = _line(_PROMPT)
    if line.strip() == _BLOCK:
        lines = []
        while (line := _line(_MORE)).strip() != _BLOCK:
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(_MORE))
    return "\n".join(lines)


def _line(prompt: str) -> str:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except UnicodeError as error:
        raise click.BadParameter("standard input is not UTF-8") from error
