"""`tokenpod models`: what this build serves. `make models` finds it out and writes models.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from tokenpod_client.cli.errors import print_error
from tokenpod_client.cli.options import argument, command, option

DATA = Path(__file__).with_name("models.json")

#: What `Entry.served` can be, and what it means.
WAYS = {
    "native": "by a family of ours",
    "transformers": "by transformers' code, over our KV pool, on one rank",
    "padded": "by transformers' code with its own caches, in padded batches, on one rank",
    "no": "not served",
    "untried": "not tried",
}


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One architecture, as config.json names it."""

    #: A key of `WAYS`.
    served: str
    #: A published checkpoint; empty if transformers' documentation names none.
    example: str
    #: What its tiny model had when it was tried.
    features: tuple[str, ...] = ()
    #: Why it is not served, or was not tried.
    reason: str = ""
    #: `model_type` in config.json; empty if transformers does not carry the architecture.
    type: str = ""
    #: The architectures that its text model may be of, if it also sees or hears: one of them
    #: computes it, and its text alone is served.
    texts: tuple[str, ...] = ()


class Survey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What models.json holds."""

    #: The version that was tried.
    transformers: str
    classes: dict[str, Entry]


def survey() -> Survey:
    """What `make models` has found."""
    return msgspec.json.decode(DATA.read_bytes(), type=Survey)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which architectures are listed, and how."""

    name: str = argument("Only those whose name or example has this in it.", "NAME", default="")
    json_output: bool = option("JSON, one object a line.", flag="--json", default=False)


@command(Chosen)
def models(wanted: Chosen) -> int:
    """List which architectures are served, by whose code, and why others are not."""
    found = survey()
    part = wanted.name.lower()
    chosen = {
        architecture: entry
        for architecture, entry in found.classes.items()
        if part in architecture.lower() or part in entry.example.lower()
    }
    if not chosen:
        print_error(f"no architecture of {len(found.classes)} has {wanted.name!r} in its name")
        return 1
    for line in _as_json(chosen) if wanted.json_output else _as_text(chosen):
        print(line)
    installed = metadata.version("transformers")
    if installed != found.transformers and not wanted.json_output:
        print(f"\nTried with transformers {found.transformers}; {installed} is installed.")
    return 0


def _as_json(chosen: dict[str, Entry]) -> Iterator[str]:
    for architecture, entry in chosen.items():
        yield json.dumps({"architecture": architecture, **msgspec.to_builtins(entry)})


def _as_text(chosen: dict[str, Entry]) -> Iterator[str]:
    widest = max(map(len, chosen))
    for way, meaning in WAYS.items():
        those = {name: entry for name, entry in chosen.items() if entry.served == way}
        if not those:
            continue
        yield f"{meaning.capitalize()} ({len(those)}):"
        for name, entry in those.items():
            yield f"  {name:<{widest}}  {entry.reason or entry.example}".rstrip()
