"""The commands that call a server: generate, tokens, info, health, and those of operators.

grpc and protobuf are imported by what they run, so that help and mistakes are printed at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.options import argument, command, option
from tokenpod_client.cli.request import RequestOptions

_json: Any = partial(option, "JSON, one object a line.", flag="--json", default=False)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What `generate` sends."""

    prompt: str = argument("What to continue; - reads standard input.", "PROMPT")
    chat: bool = option("The prompt is a user's message.", flag="--chat", default=False)
    system: str | None = option("With --chat: the system message.")
    json_lines: bool = option("Print events as JSON lines.", flag="--json", default=False)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What `batch` reads and writes."""

    prompts: Path = argument(
        "A JSON object a line: prompt, token_ids or messages; and options by their names.",
        "PROMPTS",
        exists=True,
        dir_okay=False,
    )
    answers: str = argument(
        "The file to write, a line for each prompt; - is standard output.", "ANSWERS"
    )
    concurrency: int = option("Requests at once.", min=1, max=4096, default=32)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What `chat` begins with."""

    system: str | None = option("The system message.")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What `tokens` counts."""

    text: str = argument("What to count; - reads standard input.", "TEXT")
    chat: bool = option("The text is a user's message.", flag="--chat", default=False)
    ids: bool = option("Print the token ids too.", flag="--ids", default=False)
    special: bool = option("Count what Generate would add.", default=True)
    json_output: bool = _json()


@dataclass(frozen=True, kw_only=True)
class Output:
    """How `info` prints."""

    json_output: bool = _json()


@dataclass(frozen=True, kw_only=True)
class Service:
    """Whose health is asked for."""

    service: str = option(
        "readiness, liveness, startup or a gRPC service; all if not given.", "NAME", default=""
    )
    watch: bool = option("Print every change.", flag="--watch", default=False)


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What `top` looks at, and how often."""

    server: str | None = argument("The server, as --address.", "[ADDRESS]", default=None)
    every: float = option("Time between two looks.", "SECONDS", min=0.1, default=2.0)
    count: int | None = option("Look so often, then end.", min=1)


@dataclass(frozen=True, kw_only=True)
class Level:
    """What is logged."""

    level: Literal["debug", "info", "warning", "error"] = argument("Least severity.", "LEVEL")


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """Which process of a pod."""

    process: str = option("Such as front-end-0, engine, rank-3.", "NAME", default="")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """For how long."""

    seconds: int = option("For how long.", min=1, max=60, default=5)


@command(Prompt, RequestOptions, Remote)
def generate(prompt: Prompt, options: RequestOptions, remote: Remote) -> None:
    """Continue a prompt and print the text as it comes."""
    from tokenpod_client.cli import commands

    if prompt.system is not None and not prompt.chat:
        raise click.BadParameter("needs --chat", param_hint="--system")
    request = commands.generate_request(
        _text(prompt.prompt), options.fields, chat=prompt.chat, system=prompt.system
    )
    work = commands.generate(remote, request, stream=options.stream, json_lines=prompt.json_lines)
    commands.run(work)


@command(Prompts, RequestOptions, Remote)
def batch(prompts: Prompts, options: RequestOptions, remote: Remote) -> int:
    """Answer every prompt of a file, in a file of the same order.

    Options are those of each prompt whose line does not say otherwise. Exit status 1 if any failed.
    """
    from tokenpod_client.cli import commands
    from tokenpod_client.cli.batch import batch as answer

    answers = None if prompts.answers == "-" else Path(prompts.answers)
    work = answer(remote, prompts.prompts, answers, options.fields, at_once=prompts.concurrency)
    return 0 if commands.run(work) else 1


@command(Conversation, RequestOptions, Remote)
def chat(conversation: Conversation, options: RequestOptions, remote: Remote) -> None:
    """Talk with the model; Ctrl-C ends an answer, Ctrl-D the conversation."""
    from tokenpod_client.cli import commands
    from tokenpod_client.cli.chat import talk

    if (options.n or 1) > 1:
        raise click.BadParameter("a conversation has one answer a turn", param_hint="--n")
    fields = options.fields
    with commands.remote_errors():
        talk(remote, fields, conversation.system)


@command(Counted, Remote)
def tokens(counted: Counted, remote: Remote) -> None:
    """Count the tokens of a text."""
    from tokenpod_client.cli import commands

    request = commands.tokens_request(
        _text(counted.text), chat=counted.chat, ids=counted.ids, special=counted.special
    )
    commands.run(commands.tokens(remote, request, json_output=counted.json_output))


@command(Output, Remote)
def info(output: Output, remote: Remote) -> None:
    """Show what a server runs, and what it allows."""
    from tokenpod_client.cli import commands

    commands.run(commands.info(remote, json_output=output.json_output))


@command(Service, Remote, address="127.0.0.1:50052")
def health(service: Service, remote: Remote) -> int:
    """Ask for a server's health. Exit status 0 if it is SERVING, else 1."""
    from tokenpod_client.cli import commands

    work = commands.health(remote, service.service, watch=service.watch)
    return 0 if commands.run(work) else 1


@command(Looks, Remote)
def top(looks: Looks, remote: Remote) -> None:
    """Show what a pod does: rows, queue, KV cache, rates, refusals. It needs --admin-token-file."""
    from tokenpod_client.cli import admin, commands

    server = remote if looks.server is None else replace(remote, address=looks.server).checked()
    commands.run(admin.top(server, every=looks.every, count=looks.count))


@command(Level, Remote)
def log_level(level: Level, remote: Remote) -> None:
    """Log less or more from now on. It needs --admin-token-file."""
    from tokenpod_client.cli import admin, commands

    commands.run(admin.log_level(remote, level.level))


@command(OneProcess, Remote)
def stacks(one: OneProcess, remote: Remote) -> None:
    """Print what the threads of a pod's processes do. It needs --admin-token-file."""
    from tokenpod_client.cli import admin, commands

    commands.run(admin.stacks(remote, one.process))


@command(OneProcess, Profile, Remote)
def profile(one: OneProcess, time: Profile, remote: Remote) -> None:
    """Print where a process of a pod spends its time, as stacks that flame graphs are made of.

    Without --process it is the engine. It needs --admin-token-file.
    """
    from tokenpod_client.cli import admin, commands

    commands.run(admin.profile(remote, one.process, time.seconds))


def _text(given: str) -> str:
    """The argument, or standard input for `-`. Raises BadParameter if it isn't UTF-8."""
    try:
        if given == "-":
            return sys.stdin.buffer.read().decode()
        given.encode()
    except UnicodeError as error:
        raise click.BadParameter("is not UTF-8", param_hint="PROMPT") from error
    return given
