"""Adapters are read: those that come with the model at once, later ones by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch

from tokenpod.core.adapter_files import CONFIG, digest_of, folder_within
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import AdapterFacts, EngineOptions
from tokenpod.engine.adapters.pace import Pace
from tokenpod.models.adapters.config import read_lora
from tokenpod.models.adapters.packed import Packed
from tokenpod.models.adapters.store import AdapterStore, Space
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.tensor_file import Rest, no_rest


def space_of(options: EngineOptions) -> Space | None:
    """What is to be taken for adapters; None: there are none, and none can come."""
    if options.lora_fuse or not (
        options.max_adapters or options.adapters or options.adapter_folder
    ):
        return None
    return Space(
        options.max_adapters,
        options.max_adapter_rank,
        options.max_adapter_heads,
        options.lora_vocabulary and options.max_adapters > 0,
    )


def read_given(store: AdapterStore | None, options: EngineOptions) -> list[AdapterFacts]:
    """Read this rank's part of the adapters that the operator named; numbers from 1.

    One that is fused has number 0, as none: all requests have it. Raises EngineError, naming the
    adapter.
    """
    found = []
    if options.lora_fuse:
        return [_fused(*options.adapters[0])]
    if store is not None:
        store.scales.warm()
    for number, (name, folder) in enumerate(options.adapters, start=1):
        assert store is not None, "settings take slots where adapters are given"
        try:
            found.append(read_one(store, number, name, folder))
        except ModelError as error:
            raise EngineError(f"adapter {name}: {error}") from None
    return found


def fused_folder(options: EngineOptions) -> Path | None:
    """Of the adapter that is fused into the model; None: there is none."""
    return Path(options.adapters[0][1]) if options.lora_fuse else None


def _fused(name: str, folder: str) -> AdapterFacts:
    rank = read_lora(read_fields(Path(folder) / CONFIG), whole=True).rank
    return AdapterFacts(0, name, digest_of(Path(folder)), rank, 0)


def read_one(
    store: AdapterStore, number: int, name: str, folder: str, rest: Rest = no_rest
) -> AdapterFacts:
    """Read this rank's part of an adapter, and know it by its number. Raises ModelError."""
    adapter = store.read(Path(folder), rest)
    store.keep(number, adapter)
    return AdapterFacts(
        number,
        name,
        adapter.digest,
        adapter.largest_rank,
        adapter.nbytes,
        adapter.kind,
        adapter.virtual_tokens,
        isinstance(adapter, Packed) and bool(adapter.copies),
    )


def read_below(
    store: AdapterStore, root: str, number: int, name: str, path: str, rest: Rest
) -> tuple[AdapterFacts | None, str]:
    """Read an adapter that lies at `path` below `root`; or None, and one line that says why."""
    try:
        return read_one(store, number, name, str(folder_within(root, path)), rest), ""
    except (ModelError, ValueError) as error:
        return None, str(error)
    except Exception as error:  # a thread's: who asked must hear of it
        return None, f"it can't be read ({type(error).__name__}: {error})"


class Reader:
    """A thread that reads adapters, one after the other.

    Many at once would take as many cores from the step loop, and keep as many files in memory. It
    keeps to a pace at which steps go on as without it, and to one core: threads of torch that wait
    for work would be in the way of the loop's.
    """

    def __init__(self, pace: Pace) -> None:
        self.rest = pace.rest
        self._wanted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, read: Callable[[], None]) -> None:
        """Run this behind what was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        self._wanted.put(read)

    def _run(self) -> None:
        # Of this thread, and of those that begin later: none of them multiplies.
        torch.set_num_threads(1)
        while True:
            self._wanted.get()()
