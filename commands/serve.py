"""`tokenpod serve`: every setting as a flag, generated from the settings model."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from tokenpod.commands.foreign import (
    foreign_flag,
    foreign_model,
    foreign_variables,
    removed_flag,
)
from tokenpod.service.config.settings import default_text, descriptions, group_of
from tokenpod.service.config.sources import (
    ServerSettings,
    SettingsError,
    load_settings,
    unknown_variables,
    variable,
)
from tokenpod.service.telemetry.logs import print_error
from tokenpod_client.cli.options import Argument, Command, Spec, parameter

HELP = """Start a server.

    MODEL is a folder, a name that is in the local Hugging Face cache, or `demo`, the embedded
    model, which is also what is served without one; --model-id is the same. Every flag is also a
    variable, and a key of --config: --max-best-of is TOKENPOD_MAX_BEST_OF and max-best-of.
    """


class ServerCommand(Command):
    """A command with settings as flags: for one that it lacks it says what to use instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As a command does it. Raises UsageError, which names our flag for another one."""
        self.tell = lambda text: print_error(text, json_output="--json-output" in args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if (said := removed_flag(name) or foreign_flag(name)) is None:
                raise
            raise click.UsageError(said, ctx) from None


def _run(**given: Any) -> int:
    """Load the settings and serve; the exit status."""
    flags = {name: value for name, value in given.items() if value is not None}
    try:
        settings = load_settings(**named_flags(flags))
        _check_model(settings)
    except SettingsError as error:
        for line in str(error).splitlines():
            print_error(line, json_output=_wants_json(flags))
        return 2
    warnings = [f"{name} is set, but there is no such setting" for name in unknown_variables()]
    for text in [*warnings, *foreign_variables(os.environ)]:
        print_error(text, json_output=settings.json_output, kind="warning")
    # Only now: it is most of the start, and wrong flags should be told at once.
    from tokenpod.service.pod.engine_start import killed_at_exit, start_engines

    with killed_at_exit(start_engines(settings)) as engines:
        from tokenpod.service.server import run

        return run(settings, engines=engines)


def named_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags, with the model's name among them. Raises SettingsError for two models."""
    model, rest = flags.get("model"), {n: v for n, v in flags.items() if n != "model"}
    if model is None:
        return rest
    if rest.get("model_id", model) != model:
        raise SettingsError(f"MODEL is {model}: --model-id says {rest['model_id']}")
    return {**rest, "model_id": model}


def _check_model(settings: ServerSettings) -> None:
    """Raise SettingsError for a model that is named as another server wants it."""
    named = "model_id" in settings.model_fields_set
    if (problem := foreign_model(os.environ, named=named)) is not None:
        raise SettingsError(problem)


def _wants_json(flags: dict[str, Any]) -> bool:
    """Whether settings that can't be had would have asked for JSON."""
    given = os.environ.get(variable("json_output"), "")
    return bool(flags.get("json_output", given.lower() in ("1", "true", "yes", "on", "t", "y")))


def setting_flag(name: str, field: FieldInfo) -> click.Parameter:
    """A setting as a command's parameter. Unset is None: then the variable or default holds."""
    default = default_text(field)
    about = f"{variable(name)}; {default}" if default else variable(name)
    spec = Spec(f"{descriptions()[name]} [{about}]", panel=group_of(field))
    return parameter(name, _kind(field.annotation), spec)


def _kind(annotation: Any) -> Any:
    """A type of the settings as one of the command line's: files are checked by the settings."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if parts and get_origin(annotation) is not Literal:
        return parts[0]
    return annotation


def _parameters() -> list[click.Parameter]:
    model = Argument(Spec("The model to serve.", "[MODEL]"), "model", required=False)
    fields = ServerSettings.model_fields.items()
    return [model, *(setting_flag(name, field) for name, field in fields)]


serve = ServerCommand("serve", callback=_run, params=_parameters(), help=HELP)
