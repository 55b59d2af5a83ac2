"""The command line: `serve` starts a server, the other commands are clients of one.

Exit status: 0 success, 1 a failure, 2 a usage error, 130 interrupted. Mistakes of an operator are
printed as lines that begin with `error:` on standard error, never as a traceback. grpc, protobuf
and the settings model are imported by the commands that need them, so that help comes at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tokenpod
from tokenpod.cli.bench.flags import bench
from tokenpod.cli.connection import Remote, connected
from tokenpod.cli.convert import convert
from tokenpod.cli.download import download
from tokenpod.cli.models import models
from tokenpod.cli.request import RequestOptions
from tokenpod.service.telemetry.logs import print_error


class _Commands(TyperGroup):
    """The commands, of which two get the settings' flags only once they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] == "serve":
            from tokenpod.cli.serve_flags import serve_app

            self.commands["serve"] = typer.main.get_command(serve_app())
        elif args and args[0] == "size":
            from tokenpod.cli.size_flags import size_app

            self.commands["size"] = typer.main.get_command(size_app())
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="A gRPC-only text-generation server and its clients.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="JSON, one object a line.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tokenpod {tokenpod.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command("serve")
def _serve() -> None:
    """Start a server; without flags on the embedded model."""
    raise AssertionError("replaced when it is called")


@app.command("size")
def _size() -> None:
    """Estimate whether a model fits a GPU, and how many sequences run at once."""
    raise AssertionError("replaced when it is called")


@app.command()
@connected("127.0.0.1:50051", RequestOptions)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines.", rich_help_panel="Output")
    ] = False,
    *,
    options: RequestOptions,
    remote: Remote,
) -> None:
    """Continue a prompt and print the text as it comes."""
    from tokenpod.cli import commands

    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="--system")
    request = commands.generate_request(_text(prompt), options.fields, chat=chat, system=system)
    commands.run(commands.generate(remote, request, stream=options.stream, json_lines=json_lines))


@app.command()
@connected("127.0.0.1:50051", RequestOptions)
def chat(
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    options: RequestOptions,
    remote: Remote,
) -> None:
    """Talk with the model; Ctrl-C ends an answer, Ctrl-D the conversation."""
    from tokenpod.cli import commands
    from tokenpod.cli.chat import talk

    if (options.n or 1) > 1:
        raise typer.BadParameter("a conversation has one answer a turn", param_hint="--n")
    request = commands.generate_request("", options.fields, chat=True, system=None)
    with commands.remote_errors():
        talk(remote, request, system)


app.command("bench")(bench)
app.command("download")(download)
app.command("models")(models)
app.command("convert")(convert)


@app.command()
@connected("127.0.0.1:50052")
def health(
    service: Annotated[
        str, typer.Option(help="readiness, liveness, startup or a gRPC service; all if not given.")
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Print every change.")] = False,
    *,
    remote: Remote,
) -> None:
    """Ask for a server's health: exit status 0 if it is SERVING, else 1."""
    from tokenpod.cli import commands

    healthy = commands.run(commands.health(remote, service, watch=watch))
    raise typer.Exit(0 if healthy else 1)


@app.command()
@connected("127.0.0.1:50051")
def info(
    json_output: Json = False,
    *,
    remote: Remote,
) -> None:
    """Show what a server runs, and what it allows."""
    from tokenpod.cli import commands

    commands.run(commands.info(remote, json_output=json_output))


@app.command()
@connected("127.0.0.1:50051")
def tokens(
    text: Annotated[str, typer.Argument(help="What to count; - reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="The text is a user's message.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids too.")] = False,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Count what Generate would add.")
    ] = True,
    json_output: Json = False,
    *,
    remote: Remote,
) -> None:
    """Count the tokens of a text."""
    from tokenpod.cli import commands

    request = commands.tokens_request(_text(text), chat=chat, ids=ids, special=special)
    commands.run(commands.tokens(remote, request, json_output=json_output))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    # grpc's core would add lines of its own to ours; who wants them sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = app(args=arguments, prog_name="tokenpod", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read us has enough; the interpreter's own flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except typer.TyperException as error:
        given = sys.argv[1:] if arguments is None else arguments
        return _usage_error(error, json_output="--json-output" in given)


def _usage_error(error: typer.TyperException, *, json_output: bool) -> int:
    message = getattr(error, "format_message", error.__str__)()
    for line in message.splitlines():
        print_error(line, json_output=json_output)
    return int(getattr(error, "exit_code", 2))


def _text(argument: str) -> str:
    """The argument, or standard input for `-`. Raises BadParameter if it isn't UTF-8."""
    try:
        if argument == "-":
            return sys.stdin.buffer.read().decode()
        argument.encode()
    except UnicodeError as error:
        raise typer.BadParameter("is not UTF-8", param_hint="PROMPT") from error
    return argument
