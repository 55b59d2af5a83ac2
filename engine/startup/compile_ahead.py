"""Kernels are compiled by processes of their own while the model loads.

Compiled one by one as they are first launched, kernels take most of a start whose cache is empty.
So a process beside the engine finds out which there will be (`weightless`) and compiles them into
Triton's cache, as many at a time as there are cores; the engine's first steps find them there. What
has been compiled for a model and its settings is noted in the cache, so that a start which finds
the note spends nothing on it. Nothing depends on this: a kernel that is not there is compiled when
it is launched.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from tokenpod.core.messages import EngineOptions
from tokenpod.core.own_process import die_with_parent

#: Where what decides about kernels is written: below the package.
_SOURCES = "core", "engine", "kernels", "models"


class CompileAhead:
    """The process that compiles for an engine; `wait` before the first step."""

    def __init__(self, options: EngineOptions) -> None:
        command = [sys.executable, "-P", "-m", "tokenpod.engine.startup.compile_ahead"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(options))

    def wait(self) -> None:
        """Until everything is compiled, or the process has failed: it says why on stderr."""
        self._process.wait()

    @classmethod
    def of(cls, options: EngineOptions) -> CompileAhead | None:
        """Begin; None where another does it, or there is nothing to compile."""
        place = options.placement
        # The ranks of a host share its cache; only the first compiles.
        leads = place is None or place.local_rank == 0
        return cls(options) if leads and options.device.startswith("cuda") else None


def note_of(options: EngineOptions, capability: tuple[int, int], folder: Path) -> Path:
    """The file in the cache's `folder` that says: compiled, for these options and versions."""
    found = hashlib.sha256()
    alike = msgspec.structs.replace(options, questions_fd=-1, threads=0, model_folder="")
    if alike.placement is not None:
        alike = msgspec.structs.replace(alike, placement=None)
        found.update(str(options.placement.world).encode())  # type: ignore[union-attr]
    found.update(msgspec.msgpack.encode(alike))
    found.update(json.dumps([capability, version("triton"), version("torch")]).encode())
    package = Path(__file__).resolve().parents[2]
    for part in _SOURCES:
        for path in sorted((package / part).rglob("*.*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    model = Path(options.model_folder)
    for path in sorted(model.glob("*.json")):
        if "tokenizer" not in path.name:
            found.update(path.read_bytes())
    return folder / f"tokenpod-{found.hexdigest()[:32]}.json"


def main() -> int:
    """Compile what the options on stdin need, for this machine's GPU."""
    die_with_parent()
    # The engine ignores it, and this process inherits that; a pool ends its processes with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    options = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineOptions)
    began = time.monotonic()
    # Not above: who only starts this process does without.
    import torch
    from triton import knobs

    folder = Path(knobs.cache.dir)
    device = torch.device(options.device)
    note = note_of(options, torch.cuda.get_device_capability(device), folder)
    if note.exists():
        return 0
    from tokenpod.engine.startup.weightless import find_kernels
    from tokenpod.kernels.gpu.compiling import compile_all
    from tokenpod.kernels.gpu.launch import gpu_of
    from tokenpod.models.folder import is_native

    if not is_native(Path(options.model_folder)):
        return 0
    torch.set_num_threads(1)
    gpu = gpu_of(device)
    assert gpu is not None
    imported = time.monotonic()
    kernels = find_kernels(options, gpu)
    noted = time.monotonic()
    compile_all(kernels, len(os.sched_getaffinity(0)))
    ended = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "kernels": len(kernels),
        "seconds_to_import": round(imported - began, 3),
        "seconds_to_find": round(noted - imported, 3),
        "seconds_to_compile": round(ended - noted, 3),
    }
    note.write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
