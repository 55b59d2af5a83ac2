"""`tokenpod serve`: every setting as a flag, generated from the settings model."""

from __future__ import annotations

import inspect
import os
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from tokenpod.cli.options import keyword, takes
from tokenpod.service.config import (
    ServerSettings,
    SettingsError,
    load_settings,
    unknown_variables,
    variable,
)
from tokenpod.service.config_rules import flag
from tokenpod.service.settings import default_text, descriptions, group_of
from tokenpod.service.telemetry.logs import print_error


def serve_app() -> typer.Typer:
    """An application of the one command `serve`."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")

    @app.command("serve", help=SERVE_HELP)
    @takes(setting_flag(name, field) for name, field in ServerSettings.model_fields.items())
    def serve(**given: object) -> None:
        raise typer.Exit(_run({name: v for name, v in given.items() if v is not None}))

    return app


SERVE_HELP = (
    "Start a server; without flags on the embedded model. Every flag is also a variable:"
    " TOKENPOD_PORT is --port."
)


def setting_flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """A setting as a command's parameter. Unset is None: then the variable or default holds."""
    kind: Any = field.annotation
    options = [flag(name)]
    if kind is bool:
        options = [f"{flag(name)}/--no-{flag(name)[2:]}"]
    elif type(None) in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not type(None))
    option = typer.Option(
        *options,
        help=f"{descriptions()[name]} [dim]\\[{variable(name)}][/dim]",
        rich_help_panel=group_of(field),
        show_default=default_text(field) or False,
    )
    if get_origin(kind) is Annotated:
        # The settings model checks the file; here its type serves the shell's completion.
        kind = get_args(kind)[0]
    return keyword(name, Annotated[kind | None, option])


def _wants_json(flags: dict[str, object]) -> bool:
    """Whether settings that can't be had would have asked for JSON."""
    given = os.environ.get(variable("json_output"), "")
    return bool(flags.get("json_output", given.lower() in ("1", "true", "yes", "on", "t", "y")))


def _run(flags: dict[str, object]) -> int:
    try:
        settings = load_settings(**flags)
    except SettingsError as error:
        for line in str(error).splitlines():
            print_error(line, json_output=_wants_json(flags))
        return 2
    for name in unknown_variables():
        text = f"{name} is set, but there is no such setting"
        print_error(text, json_output=settings.json_output, kind="warning")
    # Only now: it is most of the start, and wrong flags should be told at once.
    from tokenpod.service.server import run

    return run(settings)
