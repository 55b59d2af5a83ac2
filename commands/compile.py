"""`tokenpod compile`: the kernels of a model, compiled without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from tokenpod.commands.serve import ServerCommand, setting_flag
from tokenpod.core.messages import EngineOptions
from tokenpod.service.config.sources import ServerSettings, SettingsError, load_settings
from tokenpod.service.pod.model_store import ModelNotFound, resolve_model
from tokenpod.service.pod.placement import engine_options
from tokenpod_client.cli.options import option, parameters

HELP = (
    "Compile a model's kernels, without a GPU, into Triton's cache (TRITON_CACHE_DIR): those that"
    " serving it launches. Of the model, names and shapes of its tensors are read. Flags that serve"
    " has mean the same: give those that serve will have."
)

#: Compiles for one architecture, which is added; the options go to it. It imports torch.
COMPILE_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.startup.compile_ahead")


@dataclass(frozen=True)
class CompileOptions:
    """The flag that `serve` does not have."""

    architecture: list[str] | None = option(
        "Compute capability of a GPU, such as 9.0 (H100, H200). Repeatable.", "MAJOR.MINOR"
    )


def _run(own: CompileOptions, flags: dict[str, Any]) -> int:
    wanted = own.architecture or []
    if not wanted or not all(_is_capability(each) for each in wanted):
        raise click.BadParameter("a number such as 9.0 is needed", param_hint="--architecture")
    try:
        settings = load_settings(**{**flags, "device": "cuda"})
        folder = resolve_model(settings.model_id, settings.revision)
    except (SettingsError, ModelNotFound) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    options = engine_options(settings, folder, "")[0]
    return max(_compile(options, architecture) for architecture in wanted)


def _compile(options: EngineOptions, architecture: str) -> int:
    done = subprocess.run(
        [*COMPILE_COMMAND, architecture],
        input=msgspec.msgpack.encode(options),
        stdout=subprocess.PIPE,
    )
    if done.returncode:
        return 1
    found = json.loads(done.stdout)
    if "error" in found:
        print(f"error: {found['error']}", file=sys.stderr)
        return 1
    print(
        f"{architecture}: {found['kernels']} kernels, {found['compiled']} of them compiled in"
        f" {found['seconds']:.1f} s; {found['bytes'] / 1e6:.1f} MB in {found['folder']}"
    )
    if lacking := found["programs_lacking"]:
        print(
            f"warning: {lacking} programs that launch them were not compiled; first launches will"
            " need a C compiler",
            file=sys.stderr,
        )
    return 0


def _is_capability(text: str) -> bool:
    major, _, minor = text.partition(".")
    return major.isdecimal() and minor.isdecimal() and len(minor) == 1


def _parameters() -> list[click.Parameter]:
    fields = ServerSettings.model_fields.items()
    return [*_OWN, *(setting_flag(name, field) for name, field in fields)]


def _call(**given: Any) -> int:
    own = CompileOptions(**{str(each.name): given.pop(str(each.name)) for each in _OWN})
    return _run(own, {name: value for name, value in given.items() if value is not None})


_OWN = parameters(CompileOptions)
compile_kernels = ServerCommand("compile", callback=_call, params=_parameters(), help=HELP)
