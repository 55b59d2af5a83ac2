"""`tokenpod size`: whether a model fits a device, and how many sequences then run at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenpod.commands.gpus import Device
from tokenpod.core.capability import eight_bits_problem, problem_of
from tokenpod.core.capacity import GIB, Capacity, capacity, fewest_ranks, offload_slots
from tokenpod.core.messages import MTP, EngineOptions
from tokenpod.core.model_size import Footprint, dtype_of, positions_of
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.model_store import ModelNotFound, draft_folder
from tokenpod.service.pod.placement import lone_options

#: What tells a model's size; its folder is added, and what else matters. It imports torch, so it is
#: a process.
FOOTPRINT_COMMAND = (sys.executable, "-P", "-m", "tokenpod.models.footprint")

#: Lengths that are shown where the operator names none.
_USUAL_LENGTHS = (512, 2048, 8192, 32_768, 131_072)


class SizeError(Exception):
    """The question can't be answered; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `tokenpod size` found out."""

    model: Footprint
    options: EngineOptions
    device: Device
    found: Capacity
    #: The least number of shards that fits; None if none does.
    fewest: int | None
    lengths: Sequence[int]
    #: Pods that share the model.
    pods: int = 1

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of a sequence, and how many such sequences run at once."""
        rows, longest = self.found.rows, self.longest
        return [
            (length, min(self._slots // length, rows) if length <= longest else 0)
            for length in self.lengths
        ]

    @property
    def narrow(self) -> bool:
        """Whether weights of 16 bits are multiplied as float32: on this CPU, or one like it."""
        computes = self.options.device == "cpu" and dtype_of(self.model, self.options) == "float32"
        return computes and self.model.portions[1].narrow_numbers > 0

    @property
    def _slots(self) -> int:
        return self.found.slots or 0 if self.found.fits else 0

    @property
    def offload_slots(self) -> int:
        """Tokens whose keys and values the hosts' memory holds besides."""
        each_pod = max(self.found.ranks // self.pods, 1)
        return offload_slots(self.options.host_kv_bytes, each_pod, self.found.slot_bytes)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the cache holds; 0 if the model does not fit."""
        return min(self._slots, positions_of(self.model, self.options))

    @property
    def read_seconds(self) -> float | None:
        """How long a device takes at least to read all its weights once; None: it is not known.

        A step of a dense model takes no less, whatever its number of sequences.
        """
        if self.device.bandwidth is None:
            return None
        return self.found.weights / (self.device.bandwidth * 1e9)

    @property
    def obstacle(self) -> str | None:
        """Why it does not fit; None if it does."""
        found, options = self.found, self.options
        if found.fits:
            return None
        if found.free <= 0:
            need = gib(found.weights + found.reserved)
            return f"weights and reserve need {need} GiB of {gib(found.memory)}"
        if found.rows < 1:
            return (
                f"a sequence's state takes {gib(found.row_bytes)} GiB, and there is no room for a"
                " sequence and a liveness probe"
            )
        if found.slots is None:
            need = gib((options.max_batch_total_tokens or 0) * found.slot_bytes)
            room = gib(int(found.free * options.memory_fraction))
            return (
                f"the KV cache of --max-batch-total-tokens {options.max_batch_total_tokens:,}"
                f" needs {need} GiB; there is room for {room}"
            )
        asked = "--max-total-tokens" if options.max_total_tokens else "--max-batch-prefill-tokens"
        return (
            f"the KV cache has room for {found.slots:,} tokens; {asked} needs {found.least_slots:,}"
        )


def report(
    folder: Path,
    settings: ServerSettings,
    device: Device,
    *,
    num_shard: int | None,
    lengths: Sequence[int],
) -> Report:
    """Size the model in `folder` as a server with these settings would run it.

    Args:
        folder: with the model's config.json, at least.
        settings: with an explicit device.
        device: each shard has one.
        num_shard: None: the least that fits, or 1 if none does.
        lengths: of the sequences to be counted, in tokens; none: the usual ones.

    Raises SizeError for a model or a device that can't serve, and for such a number of shards.
    """
    problem = _problem(device, settings)
    if problem is not None:
        raise SizeError(problem)
    try:
        options = lone_options(settings, folder, draft=draft_folder(settings))
    except ModelNotFound as error:
        raise SizeError(str(error)) from None
    model = footprint(
        folder,
        options.quantize,
        head=options.quantize_head,
        max_total_tokens=options.max_total_tokens,
        drafts=options.speculate,
    )
    draft = None
    if options.draft_folder == MTP:
        draft = footprint(folder, options.quantize, mtp=True)
    elif options.draft_folder:
        draft = footprint(Path(options.draft_folder), heads=options.speculate)
    if options.max_adapters and model.portions[1].adapter_numbers is None:
        raise SizeError(
            f"--max-adapters is {options.max_adapters}: {model.architecture} takes none"
        )
    if options.max_total_tokens is not None and options.max_total_tokens > model.max_positions:
        raise SizeError(
            f"--max-total-tokens is {options.max_total_tokens}: the model's context has"
            f" {model.max_positions}"
        )
    fewest = fewest_ranks(model, options, memory=device.memory, draft=draft)
    if num_shard is not None and num_shard not in model.portions:
        possible = ", ".join(map(str, sorted(model.portions)))
        raise SizeError(
            f"--num-shard is {num_shard}: this model can be divided among {possible} shards"
        )
    ranks = num_shard or (fewest.ranks if fewest else 1)
    return Report(
        model=model,
        options=options,
        device=device,
        found=capacity(model, options, memory=device.memory, ranks=ranks, draft=draft),
        fewest=fewest.ranks if fewest else None,
        lengths=lengths or _usual_lengths(positions_of(model, options)),
        pods=settings.num_nodes,
    )


def _problem(device: Device, settings: ServerSettings) -> str | None:
    """Why the server would not start on such a device, whatever its memory."""
    if device.capability is None:
        return None
    problem = problem_of(device.name, device.capability)
    if problem is None and settings.kv_cache_dtype != "auto":
        return eight_bits_problem(settings.kv_cache_dtype, device.capability)
    return problem


def footprint(
    folder: Path,
    quantize: str | None = None,
    *,
    head: bool = False,
    max_total_tokens: int | None = None,
    mtp: bool = False,
    heads: int | None = None,
    drafts: int = 0,
) -> Footprint:
    """What the model in `folder` takes, or with `mtp` its layer that predicts further tokens.

    `heads`: how many are used, if the folder has Medusa heads; `drafts`: of a row, as many as may
    be wrong. Raises SizeError with what is wrong.
    """
    command = [*FOOTPRINT_COMMAND, str(folder), *(["--mtp"] if mtp else [])]
    if quantize:
        command += ["--quantize", quantize, *(["--quantize-head"] if head else [])]
    if max_total_tokens is not None:
        command += ["--max-total-tokens", str(max_total_tokens)]
    if heads is not None:
        command += ["--heads", str(heads)]
    if drafts:
        command += ["--drafts", str(drafts)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SizeError(lines[-1])
    return msgspec.json.decode(done.stdout, type=Footprint)


def as_json(report: Report) -> str:
    """One line; sizes are bytes."""
    model, found = report.model, report.found
    fields: dict[str, Any] = {
        "fits": found.fits,
        "obstacle": report.obstacle,
        "num_shard": found.ranks,
        "least_num_shard": report.fewest,
        "device": report.device.name,
        "memory_bytes": found.memory,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "dtype": dtype_of(model, report.options),
        "quantize": model.quantize,
        "kv_cache_dtype": report.options.kv_cache_dtype,
        "weight_bytes": found.weights,
        "weight_read_seconds": report.read_seconds,
        "reserve_bytes": {_key(name): size for name, size in found.reserve.items()},
        "state_bytes_per_sequence": found.row_bytes,
        "sequences_at_once": found.rows if found.fits else 0,
        "kv_bytes_per_token": found.slot_bytes,
        "kv_slots": found.slots if found.fits else 0,
        "window_bytes_per_token": found.window_bytes,
        "window_slots": found.window_slots if found.fits else 0,
        "host_slots": report.offload_slots,
        "longest_sequence": report.longest,
        "sequences": [{"tokens": length, "at_once": n} for length, n in report.sequences],
    }
    return json.dumps(fields)


def _key(name: str) -> str:
    return name.lower().replace(" ", "_")


def as_text(report: Report) -> str:
    """For people."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    model, found = report.model, report.found
    source = "safetensors" if model.from_tensors else "config.json"
    products = model.quantize
    formats = dtype_of(model, report.options) + (
        f", products as {products}" if products != "none" else ""
    )
    if report.narrow:
        formats += ", weights of 16 bits as stored"
    parameters = f"{model.parameters:,} parameters as {formats} (from {source})"
    yield f"model    {model.architecture}, {parameters}"
    yield f"device   {report.device.name}, {gib(found.memory)} GiB"
    yield f"shards   {found.ranks}"
    yield ""
    yield f"{'on each device':<16}{'GiB':>8}"
    yield f"{'weights':<16}{gib(found.weights):>8}{_reading(report)}"
    parts = ", ".join(f"{name} {gib(size)}" for name, size in found.reserve.items())
    yield f"{'reserve':<16}{gib(found.reserved):>8}  {parts}"
    if found.fits:
        cache = f"{found.slots or 0:,} tokens of {found.slot_bytes / 1024:g} KiB"
        if found.row_bytes:
            cache += f", and {found.rows:,} states of {found.row_bytes / 1024:g} KiB"
        if found.window_slots:
            each = f"{found.window_bytes / 1024:g} KiB"
            cache += f"; windows: {found.window_slots:,} slots of {each}, in the reserve"
        elif found.windows is not None:
            cache += f"; windows: {found.windows}"
        elif not found.slot_bytes and not found.row_bytes:
            cache = f"none: texts are read as a whole, {found.slots or 0:,} tokens at once"
        yield f"{'KV cache':<16}{gib(found.kv_bytes):>8}  {cache}"
        yield f"{'left':<16}{gib(found.free - found.kv_bytes):>8}"
        if report.offload_slots:
            tokens = f"{report.offload_slots:,} tokens more, of each pod's host"
            yield f"{'host memory':<16}{gib(report.options.host_kv_bytes):>8}  {tokens}"
        yield ""
        yield f"{'tokens':>16}{'sequences at once':>20}"
        for length, count in report.sequences:
            yield f"{length:>16,}{f'{count:,}' if count else 'none':>20}"
    yield ""
    yield from _verdict(report)


def _reading(report: Report) -> str:
    if report.read_seconds is None:
        return ""
    return f"  all read in {1e3 * report.read_seconds:.3g} ms at {report.device.bandwidth:,} GB/s"


def _verdict(report: Report) -> Iterator[str]:
    if report.obstacle is None:
        yield _fit(report)
        return
    yield f"It does not fit: {report.obstacle}."
    if report.fewest is None:
        yield "No number of shards does."
    else:
        yield f"The least that does is --num-shard {report.fewest}."


def _fit(report: Report) -> str:
    positions = positions_of(report.model, report.options)
    if report.longest == positions:
        return "It fits."
    return (
        f"It fits, with sequences of {report.longest:,} tokens at most; the model's context is"
        f" {positions:,}."
    )


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f}"


def _usual_lengths(positions: int) -> list[int]:
    return [length for length in _USUAL_LENGTHS if length <= positions] or [positions]
