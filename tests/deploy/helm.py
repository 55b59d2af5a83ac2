"""Helm's own engine, in a process of its own: what the chart becomes, or why it is refused.

`Helm` is a client of that process (helm_engine.py). It is apart because the engine is a Go library
with threads and signal handlers of its own, which a process that forks servers had better not have.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TESTS = Path(__file__).resolve().parents[1]
CHART = _TESTS.parent / "deploy" / "helm" / "tokenpod"
RELEASE = "demo"
NAMESPACE = "models"

Object = dict[str, Any]


class Refused(Exception):
    """Helm refuses these values; the text is what it says."""


@dataclass(frozen=True)
class Rendered:
    """What `helm install` makes: objects, hooks and the notes for whoever installed."""

    objects: list[Object]
    hooks: list[Object]
    notes: str

    def all(self, kind: str) -> list[Object]:
        """Every object of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        """The only object of a kind, or the only one with this name."""
        found = [e for e in self.all(kind) if name is None or e["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} {kind}s, not one"
        return found[0]


class Helm:
    """The engine's process. Close it in the end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.helm_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Releases are kept in memory. Go reads the environment as it was at the start.
            env={**os.environ, "HELM_DRIVER": "memory", "PYTHONPATH": str(_TESTS)},
        )
        self._rendered: dict[str, Rendered] = {}

    def install(
        self, values: Object | None = None, *, kubernetes: str = "1.34", as_set: bool = False
    ) -> Rendered:
        """Install the chart with these values, from a file or `as_set`. Raises Refused."""
        if as_set:
            with _chart_with(values or {}) as chart:
                return _rendered(self._ask(_order(chart, values, kubernetes)))
        order = _order(CHART, values, kubernetes)
        key = json.dumps(order, sort_keys=True)
        if key not in self._rendered:
            self._rendered[key] = _rendered(self._ask(order))
        # Tests may change what they get.
        return copy.deepcopy(self._rendered[key])

    def lint(self) -> Object:
        """What `helm lint` says."""
        return self._ask({"action": "lint", "chart": str(CHART)})

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _ask(self, order: Object) -> Object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["done"]


def _order(chart: Path, values: Object | None, kubernetes: str) -> Object:
    return {
        "action": "install",
        "chart": str(chart),
        "release": RELEASE,
        "namespace": NAMESPACE,
        "values": values or {},
        "kubernetes": kubernetes,
    }


@contextlib.contextmanager
def _chart_with(values: Object) -> Iterator[Path]:
    """The chart as it is for values of --set: their whole numbers are int64, in files float64."""
    typed = "".join(_typed(values, ".Values"))
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / CHART.name
        shutil.copytree(CHART, chart)
        # It comes first, and all templates share the values.
        checks = chart / "templates" / "_checks.tpl"
        begin = '{{- define "tokenpod.check" -}}'
        text = checks.read_text()
        assert begin in text
        checks.write_text(text.replace(begin, begin + typed))
        yield chart


def _typed(values: Object, path: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and name.isidentifier():
            yield from _typed(value, f"{path}.{name}")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f'{{{{- $_ := set {path} "{name}" (int64 {value}) -}}}}'


def _rendered(release: Object) -> Rendered:
    manifest = yaml.load_all(release["manifest"], yaml.CSafeLoader)
    hooks = [yaml.load(hook["manifest"], yaml.CSafeLoader) for hook in release.get("hooks") or ()]
    return Rendered([each for each in manifest if each], hooks, release["info"]["notes"])
