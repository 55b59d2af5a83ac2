"""What a run found: Markdown tables and JSON as it goes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Report:
    """Rows of tables. Lists are shown as median (least to most), names with `share` in percent.

    All that there is so far is in the JSON file at `path`, if there is one: also if the run is
    killed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.about = about()
        self._path = path
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self._open: tuple[str, tuple[str, ...]] | None = None
        print(", ".join(f"{name} {value}" for name, value in self.about.items()), flush=True)

    def row(self, table: str, **cells: Any) -> None:
        """Print a row; a header too, where the table or its columns change."""
        self.tables.setdefault(table, []).append(cells)
        opened = (table, tuple(cells))
        if opened != self._open:
            names = [name.replace("_", " ") for name in cells]
            print(f"\n**{table}**\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
            self._open = opened
        print("| " + " | ".join(shown(name, cells[name]) for name in cells) + " |", flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Print a line between tables; it is in the JSON too."""
        self.tables.setdefault("notes", []).append({"note": text})
        self._open = None
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        """All rows, with what they were measured on and by which command."""
        if self._path is not None:
            written = json.dumps({"about": self.about, **self.tables}, indent=1, default=str)
            part = self._path.with_name(self._path.name + ".part")
            part.write_text(written + "\n")
            part.replace(self._path)


def about() -> dict[str, str]:
    """The command, the commit, the machine."""
    found = {
        "command": " ".join(["benchmarks/run.py", *sys.argv[1:]]),
        "commit": commit_of(ROOT),
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "load": " ".join(f"{each:.1f}" for each in os.getloadavg()),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch"] = torch.__version__
        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name()
    return found


def commit_of(folder: Path) -> str:
    """What is checked out there, and whether files differ from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=8"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return "unknown"


def shown(name: str, value: Any) -> str:
    """A cell: lists as median (least to most), a `share` in percent."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        each = [shown(name, f(value)) for f in (statistics.median, min, max)]
        return f"{each[0]} ({each[1]} to {each[2]})" if len(value) > 1 else each[0]
    if isinstance(value, float) and "share" in name:
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
