"""The corpus: the running interpreter's standard library, and which modules are held out."""

from __future__ import annotations

import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Not code: character tables, documentation kept as strings, sources that are broken on purpose.
EXCLUDED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3.tests.data")

HELD_OUT_ONE_IN = 28


def is_held_out(module: str) -> bool:
    """Whether tokenizer and model never see this module: a hash of its name, the same always."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def standard_library() -> dict[str, bytes]:
    """Every module of the running interpreter's standard library: name -> source, UTF-8 only."""
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if any(name == part or name.startswith(part + ".") for part in EXCLUDED):
            continue
        source = path.read_bytes()
        try:
            source.decode("utf-8")
            with warnings.catch_warnings(action="ignore"):
                compile(source, name, "exec", dont_inherit=True)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        if source.strip():
            modules[name] = source
    return modules


def split(modules: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The modules to learn from, and the held-out ones less those that repeat one of the former."""
    train = {name: source for name, source in modules.items() if not is_held_out(name)}
    known = set(train.values())
    held_out = {
        name: source
        for name, source in modules.items()
        if is_held_out(name) and source not in known
    }
    return train, held_out


def shared_lines(train: dict[str, bytes], held_out: dict[str, bytes]) -> dict[str, float]:
    """For each held-out module the share of its runs of five non-blank lines seen in training.

    High values are near duplicates. They stay in the set; the model card counts them.
    """

    def runs(source: bytes) -> Iterator[tuple[bytes, ...]]:
        lines = [line.strip() for line in source.splitlines() if line.strip()]
        return (tuple(lines[i : i + 5]) for i in range(len(lines) - 4))

    seen = {hash(run) for source in train.values() for run in runs(source)}
    shares = {}
    for name, source in held_out.items():
        matches = [hash(run) in seen for run in runs(source)]
        shares[name] = sum(matches) / len(matches) if matches else 0.0
    return shares
