"""`tokenpod size`: its flags, of which those that `serve` has too come from the settings model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from tokenpod.commands.gpus import GPUS, Device
from tokenpod.commands.serve import ServerCommand, setting_flag
from tokenpod.commands.size import Report, SizeError, as_json, as_text, report
from tokenpod.core.capacity import GIB
from tokenpod.core.cgroup import memory_limits
from tokenpod.service.config.sources import ServerSettings, SettingsError, load_settings
from tokenpod.service.pod.model_store import ModelNotFound, resolve_model
from tokenpod_client.cli.options import option, parameters

SIZE_HELP = (
    "Estimate whether a model fits a device, how large its KV cache is and how many sequences run"
    " at once. Needs no GPU, and of the model no more than config.json. Exit status 1 if it does"
    " not fit. Flags that serve has mean the same, and have its variables."
)

_NAMES = ", ".join(GPUS)

#: Settings that decide how much memory a server takes.
_SETTINGS = (
    "model_id",
    "revision",
    "dtype",
    "quantize",
    "quantize_head",
    "kv_cache_dtype",
    "max_total_tokens",
    "max_batch_size",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "memory_fraction",
    "speculate",
    "draft_model",
    "host_kv_bytes",
    "max_adapters",
    "max_adapter_rank",
    "max_adapter_heads",
    "lora_vocabulary",
)

_device_option = partial(option, panel="Device")


@dataclass(frozen=True)
class SizeOptions:
    """The flags that `serve` does not have."""

    gpu: str | None = _device_option(f"One of {_NAMES}.")
    memory_gib: float | None = _device_option(
        "Memory of a GPU that is not in the list; with --cpu that of the container, whose own limit"
        " is the default.",
        "GIB",
        min=0.001,
        max=1 << 20,
    )
    cpu: bool = _device_option(
        "Run on a CPU; the default where there is no GPU and none is named.",
        flag="--cpu",
        default=False,
    )
    num_shard: int | None = _device_option(
        "Devices that share the model, in all pods. Default: what serve's variables say, else the"
        " fewest that it fits.",
        min=1,
    )
    length: list[int] | None = option(
        "Count sequences of so many tokens. Repeatable.", "TOKENS", min=1
    )
    json_output: bool = option("JSON; sizes are bytes.", flag="--json", default=False)


def _run(own: SizeOptions, flags: dict[str, object]) -> int:
    named = own.gpu is not None or own.memory_gib is not None
    try:
        # Unless a device is named, it is that of this pod.
        cpu = own.cpu or (not named and load_settings(**flags).resolved_device == "cpu")
        device = _device(own.gpu, own.memory_gib, cpu=cpu)
        settings = load_settings(**flags, device="cpu" if cpu else "cuda")
        folder = resolve_model(settings.model_id, settings.revision)
        found = _report(folder, settings, device, own)
    except (SettingsError, ModelNotFound, SizeError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    print(as_json(found) if own.json_output else as_text(found))
    return 0 if found.found.fits else 1


def _report(folder: Path, settings: ServerSettings, device: Device, own: SizeOptions) -> Report:
    shards = own.num_shard
    if shards is None and {"num_shard", "num_nodes"} & settings.model_fields_set:
        # A pod of a group asks about its own group.
        shards = settings.world
    return report(folder, settings, device, num_shard=shards, lengths=own.length or ())


def _device(gpu: str | None, memory_gib: float | None, *, cpu: bool) -> Device:
    """What the operator names, or this CPU. Raises BadParameter unless that is one thing."""
    if gpu is not None:
        if cpu or memory_gib is not None:
            raise click.BadParameter("goes without --cpu and --memory-gib", param_hint="--gpu")
        if gpu.lower() not in GPUS:
            problem = f"is {gpu}: it must be one of {_NAMES}, or give --memory-gib"
            raise click.BadParameter(problem, param_hint="--gpu")
        return GPUS[gpu.lower()]
    if memory_gib is None and cpu:
        memory, source = _own_memory()
        return Device(f"this CPU, {source}", memory)
    if memory_gib is None:
        problem = "or --gpu is needed: which device is it?"
        raise click.BadParameter(problem, param_hint="--memory-gib")
    return Device("CPU" if cpu else "GPU", int(memory_gib * GIB))


def _own_memory() -> tuple[int, str]:
    """Bytes that a server in this container may have in all, and whose limit that is."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = min((each.limit for each in memory_limits()), default=machine)
    return min(least, machine), "memory limit" if least < machine else "whole machine"


def _parameters() -> list[click.Parameter]:
    return [*(setting_flag(name, ServerSettings.model_fields[name]) for name in _SETTINGS), *_OWN]


def _call(**given: Any) -> int:
    own = SizeOptions(**{str(each.name): given.pop(str(each.name)) for each in _OWN})
    return _run(own, {name: value for name, value in given.items() if value is not None})


_OWN = parameters(SizeOptions)
size = ServerCommand("size", callback=_call, params=_parameters(), help=SIZE_HELP)
