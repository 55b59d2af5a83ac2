"""Kernels are compiled by processes of their own while the model loads.

Compiled one by one as they are first launched, kernels take most of a start whose cache is empty.
So a process beside the engine finds out which there will be (`weightless`) and compiles each into
Triton's cache as soon as it is found, as many at a time as there are cores; the engine's first
steps find them there. It starts with the engine, and imports while the front end does. What has
been compiled for a model and its settings is noted in the cache, so that a start which finds the
note spends nothing on it. Nothing depends on this: a kernel that is not there is compiled when it
is launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.messages import EngineOptions
from tokenpod.core.own_process import die_with_parent
from tokenpod.engine.startup.conditions import conditions, write_whole
from tokenpod.models.checkpoints.errors import ModelError

#: Streaming multiprocessors by architecture: A100, L40S, H100 and H200, B200, RTX PRO 6000. They
#: decide into how many parts attention is split, of which kernels know only whether it is.
_PROCESSORS = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 188}
_USUAL_PROCESSORS = 132
#: Compilers at once: the longest kernel takes as long as a sixteenth of all.
_MOST_PROCESSES = 16
#: Seconds that an engine waits for it behind its weights; ranks wait longer for each other.
_MOST_SECONDS = 300.0


class CompileAhead:
    """The process that compiles for an engine: `begin` it, and `wait` before the first step."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "tokenpod.engine.startup.compile_ahead"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def begin(self, options: EngineOptions) -> None:
        """Compile what such an engine launches."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(options))

    def wait(self) -> None:
        """Until everything is compiled, or the process has failed: it says why on stderr.

        One that takes minutes is ended: the first steps compile what is left.
        """
        try:
            self._process.wait(_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def hash_triton() -> threading.Thread:
    """Begin to hash Triton's own files, which is done without the interpreter's lock.

    Each key of the cache holds the hash. Triton finds it once, which takes up to two seconds: those
    of the thread that is returned, or else of the first launch.
    """
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="triton-key", daemon=True)
    thread.start()
    return thread


def note_of(options: EngineOptions, capability: tuple[int, int], folder: Path) -> Path:
    """The file in the cache's `folder` that says: compiled, for these options and versions."""
    found = hashlib.sha256()
    world = options.placement.world if options.placement is not None else 1
    # What only the scheduler and the size of the pool follow from, launches no other kernels.
    alike = msgspec.structs.replace(
        options,
        model_folder="",
        device="cuda",
        threads=0,
        questions_fd=-1,
        placement=None,
        fewer_rows=False,
        shortest_first=False,
        max_gap_seconds=None,
        max_batch_total_tokens=None,
        memory_fraction=0.0,
        admission="",
        constraints=ConstraintLimits(),
    )
    found.update(msgspec.msgpack.encode(alike))
    found.update(json.dumps([world, capability]).encode())
    found.update(conditions(Path(options.model_folder)))
    return folder / f"tokenpod-{found.hexdigest()[:32]}.json"


def compile_for(
    options: EngineOptions, architecture: str | None, hashing: threading.Thread
) -> dict[str, Any]:
    """Compile what such an engine launches on this machine's GPU, or on one of an architecture.

    `hashing` is of `hash_triton`. Returns how many kernels there are and how many were compiled,
    how many programs in C that launch them could not be, how long that took, and where they are
    and the bytes there. Raises ModelError for a folder that can't be read.
    """
    # Not above: who only starts this process does without.
    import torch
    from triton import knobs

    from tokenpod.kernels.gpu.launch import Gpu, gpu_of

    began = time.monotonic()
    if architecture is None:
        if not torch.cuda.is_available():
            return {"error": "torch finds no usable GPU"}  # the engine says it
        gpu = gpu_of(torch.device(options.device))
        assert gpu is not None
    else:
        major, _, minor = architecture.partition(".")
        capability = int(major), int(minor)
        gpu = Gpu(capability, _PROCESSORS.get(capability, _USUAL_PROCESSORS))
    folder = Path(knobs.cache.dir)
    note = note_of(options, gpu.capability, folder)
    if note.exists() and architecture is None:
        return json.loads(note.read_text())  # type: ignore[no-any-return]
    from tokenpod.engine.startup.sampling_kernels import find_sampling
    from tokenpod.kernels.gpu.compiling import Compilers

    torch.set_num_threads(1)
    hashing.join()  # a process that forks has one thread
    compilers = Compilers(min(len(os.sched_getaffinity(0)), _MOST_PROCESSES))
    if options.placement is None or options.placement.rank == 0:
        find_sampling(options, gpu.capability, compilers.take)
    # Only now: these take a second, and the longest kernels are being compiled meanwhile.
    from tokenpod.engine.startup.weightless import find_kernels
    from tokenpod.models.folder import is_native

    # What transformers computes launches few of our kernels, and has no shapes without weights.
    native = is_native(Path(options.model_folder))
    kernels = find_kernels(options, gpu, compilers.take) if native else []
    found = time.monotonic()
    compilers.end()
    facts = {
        "kernels": len(kernels),
        "compiled": compilers.lacking,
        "programs_lacking": compilers.no_programs,
        "seconds_to_find": found - began,
        "seconds": time.monotonic() - began,
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "folder": str(folder),
    }
    with contextlib.suppress(OSError):  # a cache that is full of what is needed may be read-only
        write_whole(note, json.dumps(facts))
    return facts


def _has_notes() -> bool:
    """Whether anything was compiled here before: then imports may turn out to be needless."""
    from triton import knobs

    return any(Path(knobs.cache.dir).glob("tokenpod-*.json"))


def main() -> int:
    """Compile what the options on stdin need; says what that was."""
    die_with_parent()
    # The engine ignores it, and this process inherits that; a pool ends its processes with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    hashing = hash_triton()
    if not _has_notes():
        import tokenpod.engine.startup.sampling_kernels

        if not select.select([sys.stdin], [], [], 0)[0]:
            import tokenpod.engine.startup.weightless  # noqa: F401
    told = sys.stdin.buffer.read()
    if not told:
        return 0  # the engine has ended
    options = msgspec.msgpack.decode(told, type=EngineOptions)
    try:
        said = compile_for(options, sys.argv[1] if len(sys.argv) > 1 else None, hashing)
    except ModelError as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    # An engine waits for the end, and taking down torch and CUDA takes most of a second.
    os._exit(main())
