"""Adapters that are loaded with the model."""

from __future__ import annotations

from pathlib import Path

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import AdapterFacts, EngineOptions
from tokenpod.models.adapters.store import AdapterStore, Space
from tokenpod.models.errors import ModelError


def space_of(options: EngineOptions) -> Space | None:
    """What is to be taken for adapters; None: nothing."""
    if not options.max_adapters:
        return None
    return Space(options.max_adapters, options.max_adapter_rank)


def read_given(store: AdapterStore | None, options: EngineOptions) -> list[AdapterFacts]:
    """Read this rank's part of the adapters that the operator named; numbers from 1.

    Raises EngineError, naming the adapter.
    """
    found = []
    for number, (name, folder) in enumerate(options.adapters, start=1):
        assert store is not None, "settings take slots where adapters are given"
        found.append(read_one(store, number, name, folder))
    return found


def read_one(store: AdapterStore, number: int, name: str, folder: str) -> AdapterFacts:
    """Read this rank's part of an adapter, and know it by its number. Raises EngineError."""
    try:
        adapter = store.read(Path(folder))
    except ModelError as error:
        raise EngineError(f"adapter {name}: {error}") from None
    store.keep(number, adapter)
    return AdapterFacts(number, name, adapter.digest, adapter.rank, adapter.nbytes)
