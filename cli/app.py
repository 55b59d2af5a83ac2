"""The command line: commands that talk to a server, and those that the server's package adds.

Exit status: 0 success, 1 a failure, 2 a usage error, 130 interrupted. Mistakes of an operator are
printed as lines that begin with `error:` on standard error, never as a traceback. A command is
imported when it is called, so that help comes at once.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import click

import tokenpod_client
from tokenpod_client.cli.entries import Entry
from tokenpod_client.cli.errors import print_error

#: Mappings of names to `Entry`, which packages add to ours.
GROUP = "tokenpod.commands"

CLIENT = {
    "generate": Entry("Continue a prompt and print the text as it comes.", "calls:generate"),
    "batch": Entry("Answer every prompt of a file.", "calls:batch"),
    "chat": Entry("Talk with the model.", "calls:chat"),
    "tokens": Entry("Count the tokens of a text.", "calls:tokens"),
    "info": Entry("Show what a server runs, and what it allows.", "calls:info"),
    "health": Entry("Ask for a server's health.", "calls:health"),
    "top": Entry("Show what a pod does: rows, queue, KV cache, rates, refusals.", "calls:top"),
    "log-level": Entry("Log less or more from now on.", "calls:log_level"),
    "stacks": Entry("Print what the threads of a pod's processes do.", "calls:stacks"),
    "profile": Entry("Print where a process of a pod spends its time.", "calls:profile"),
    "bench": Entry("Measure a running server under load.", "bench.entry:bench"),
}
#: Commands of the server's package.
SERVER = ("serve", "gateway", "size", "compile", "models", "download", "convert", "quantize")


class Commands(click.Group):
    """Our commands, and those of installed packages."""

    def list_commands(self, ctx: click.Context | None = None) -> list[str]:
        """Names of all commands, in the order of help."""
        return list(self.entries)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """A command by its name; None if there is none."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry.where.partition(":")
        found: click.Command = getattr(importlib.import_module(module, "tokenpod_client.cli"), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As a group does it; a command of the server, if that is not installed, is explained."""
        if args[0] in SERVER and args[0] not in self.entries:
            ctx.fail(f"{args[0]} is a command of the server: pip install tokenpod")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As a group does it; Ctrl-C is an exit status, without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Their summaries, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.entries.items()])

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Every command by its name."""
        added: dict[str, Entry] = {}
        for point in entry_points(group=GROUP):
            added |= point.load()
        ours = {name: entry.within("tokenpod_client.cli") for name, entry in CLIENT.items()}
        return {**added, **ours}


def _version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"tokenpod {tokenpod_client.__version__}")
        ctx.exit()


@click.group(cls=Commands, help="A text-generation server that speaks gRPC, and its clients.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version and exit.",
)
def app() -> None:
    """Options that stand before a command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    # grpc's core would add lines of its own to ours; who wants them sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        status = app.main(arguments, prog_name="tokenpod", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read us has enough; the interpreter's own flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.ClickException as error:
        context: click.Context | None = getattr(error, "ctx", None)
        tell = getattr(context and context.command, "tell", print_error)
        for line in error.format_message().splitlines():
            tell(line)
    return 2
