"""Commands, and tables of options: dataclasses whose fields become a command's flags."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from tokenpod_client.cli.errors import print_error

#: What help calls a value unless the table does.
_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
_UINT32 = 2**32 - 1
#: What a table says of values rather than of an option.
_BOUNDS = ("min", "max", "exists", "dir_okay", "file_okay")
#: Characters of values that are shown beside a flag, within 80 columns.
_LONGEST_CHOICE = 50


@dataclass(frozen=True)
class Spec:
    """What a table says of an option or, without `flag`, of an argument."""

    text: str
    metavar: str | None = None
    flag: str = ""
    panel: str = "Options"
    positional: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def option(
    text: str, metavar: str | None = None, *, flag: str = "", default: Any = None, **more: Any
) -> Any:
    """A field of a table.

    Args:
        text: help.
        flag: its name, if not the one that the field's name gives.
        default: its value where the flag is not given.
        more: `panel` is its heading in help; `min` and `max` bound a number; `exists`, `dir_okay`
            and `file_okay` say what a path may be; the rest is `click.Option`'s.
    """
    panel = more.pop("panel", "Options")
    return field(default=default, metadata={"spec": Spec(text, metavar, flag, panel, more=more)})


def argument(text: str, metavar: str, **more: Any) -> Any:
    """A field of a table that has no flag, but a place. Without a default it is needed."""
    default = {"default": more.pop("default")} if "default" in more else {}
    return field(metadata={"spec": Spec(text, metavar, positional=True, more=more)}, **default)


class Argument(click.Argument):
    """A positional value, which help explains."""

    def __init__(self, spec: Spec, name: str, **more: Any) -> None:
        super().__init__([name], metavar=spec.metavar, **more)
        self.text = spec.text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Its name and what it is."""
        return self.make_metavar(ctx), self.text


class Option(click.Option):
    """A flag below a heading of its own."""

    def __init__(self, names: list[str], panel: str, **more: Any) -> None:
        super().__init__(names, **more)
        self.panel = panel

    def get_help_extra(self, ctx: click.Context) -> Any:
        """What help says in brackets. That a number must fit into its field goes without saying."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, click.IntRange) and (self.type.max or 0) >= _UINT32:
            extra.pop("range", None)
        return extra


class Command(click.Command):
    """A command whose help has its options below headings.

    `tell` prints a usage error as the command prints its other errors.
    """

    tell: Callable[[str], None] = staticmethod(print_error)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments, then every panel in the order of its first option."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            panel = "Arguments" if isinstance(each, Argument) else getattr(each, "panel", "Options")
            record = each.get_help_record(ctx)
            if record is not None:
                panels.setdefault(panel, []).append(record)
        # What every command has comes last.
        panels = {**{n: r for n, r in panels.items() if n != "Options"}, **panels}
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def command(*tables: type, **defaults: Any) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command: it is called with an instance of each table.

    A table that has a method `checked` is passed as that returns it. The function's docstring is
    the help, its result the exit status.

    Args:
        defaults: of fields by their names, where a command has others than the table.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        own = [parameters(table, **defaults) for table in tables]

        def run(**given: Any) -> int:
            values = []
            for table, found in zip(tables, own, strict=True):
                made = table(**{str(each.name): given[str(each.name)] for each in found})
                values.append(made.checked() if hasattr(made, "checked") else made)
            return function(*values) or 0

        name = function.__name__.replace("_", "-")
        params = [each for found in own for each in found]
        return Command(name, callback=run, params=params, help=function.__doc__)

    return decorate


def parameters(table: type, **defaults: Any) -> list[click.Parameter]:
    """The fields of a table as parameters, with other defaults for those that are named."""
    kinds = get_type_hints(table)
    return [
        parameter(
            each.name,
            kinds[each.name],
            each.metadata["spec"],
            defaults.get(each.name, each.default),
        )
        for each in fields(table)
    ]


def parameter(name: str, kind: Any, spec: Spec, default: Any = None) -> click.Parameter:
    """One option or argument.

    Args:
        kind: bool, int, float, str, Path, an Enum, a Literal, a list of one of them, or None too.
        default: MISSING for an argument that is needed.
    """
    many, plain = _plain(kind)
    more = {key: value for key, value in spec.more.items() if key not in _BOUNDS}
    more["type"] = _type(plain, {key: v for key, v in spec.more.items() if key in _BOUNDS})
    if spec.positional:
        given = {} if default is MISSING else {"default": default}
        return Argument(spec, name, required=default is MISSING, **given, **more)
    if many:
        more |= {"multiple": True, "callback": lambda ctx, param, value: list(value) or None}
    flags = spec.flag or f"--{name.replace('_', '-')}"
    if plain is bool:
        more = {**more, "is_flag": True}
        flags = flags if spec.flag else f"{flags}/--no-{flags[2:]}"
    elif get_origin(plain) is not Literal and not _is_enum(plain):
        more["metavar"] = spec.metavar or _METAVARS.get(plain)
    return Option(
        [name, flags],
        spec.panel,
        default=default,
        help=spec.text,
        **{"show_default": default not in (None, "", False), **more},
    )


class _Choice(click.Choice[str]):
    """Shows its values, unless they fill more than a line of help: then the text names them."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        shown = super().get_metavar(param, ctx)
        return shown if shown is None or len(shown) <= _LONGEST_CHOICE else "NAME"


class _Member(click.Choice[str]):
    """A member of an enum, by its value: click's own choices are by the members' names."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__([each.value for each in kind])
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._kind(super().convert(value, param, ctx))


def _plain(kind: Any) -> tuple[bool, Any]:
    """Whether it is a list, and of what it is, without None and annotations."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return (True, get_args(kind)[0]) if get_origin(kind) is list else (False, kind)


def _type(kind: Any, bounds: dict[str, Any]) -> Any:
    if get_origin(kind) is Literal:
        return _Choice(get_args(kind))
    if _is_enum(kind):
        return _Member(kind)
    if kind is Path:
        return click.Path(path_type=Path, **bounds)
    if bounds:
        return (click.IntRange if kind is int else click.FloatRange)(**bounds)
    return kind


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
