"""Tables of options: dataclasses whose fields become a command's flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

#: What help calls a value unless the table does.
_METAVARS = {int: "N", float: "X", Path: "FILE"}


def option(
    text: str, metavar: str | None = None, *, flag: str = "", default: Any = None, **more: Any
) -> Any:
    """A field of a table.

    Args:
        text: help.
        flag: its name, if not the one that the field's name gives.
        default: its value where the flag is not given.
        more: for `typer.Option`; `panel` is short for `rich_help_panel`.
    """
    panel, flags = more.pop("panel", None), [flag] if flag else []
    made = typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel, **more)
    return field(default=default, metadata={"option": made})


def parameters(table: type, **defaults: Any) -> list[inspect.Parameter]:
    """The fields of a table as parameters, with other defaults for those that are named."""
    found = []
    for each in fields(table):
        kind, made = get_type_hints(table)[each.name], each.metadata["option"]
        plain = next((part for part in get_args(kind) if part is not type(None)), kind)
        made.metavar = made.metavar or _METAVARS.get(plain)
        default = defaults.get(each.name, each.default)
        found.append(keyword(each.name, Annotated[kind, made], default))
    return found


def keyword(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    """A parameter that is given by its name."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def takes(found: Iterable[inspect.Parameter]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of `**values` a command with these parameters."""
    wanted = list(found)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        # Typer reads a command's options off its signature.
        command.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in wanted}
        return command

    return decorate
