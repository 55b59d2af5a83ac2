"""The standard library's modules, and those of them that the demo model was not trained on."""

from __future__ import annotations

import hashlib
import sysconfig
import warnings
from pathlib import Path

# Not code: character tables, documentation kept as strings, sources that are broken on purpose.
EXCLUDED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3.tests.data")

HELD_OUT_ONE_IN = 28


def is_held_out(module: str) -> bool:
    """Whether the demo model's training and its tokenizer left this module out: by its name."""
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
