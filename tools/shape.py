"""Print the size of the product's packages and the cycles of its imports; fail on a new cycle.

python tools/shape.py            exit status 1 if there is one that is not listed
python tools/shape.py --shrink   take what is no cycle any more off the list

Packages (`scheduler`), folders (`scheduler/drafts`) and modules (`scheduler/drafts/tree`) are
compared separately. An import counts wherever it stands: in a function, or under TYPE_CHECKING. It
is part of a cycle if what it imports leads back to it. tests/import_cycles.txt lists the imports
of today's cycles; it may only get shorter.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "tests" / "import_cycles.txt"
LEVELS = ("packages", "folders", "modules")
#: One thing imports another, both by their paths.
Edge = tuple[str, str]


def sources(src: Path) -> dict[str, Path]:
    """The modules below a root of packages, links followed, by their full names; no stubs."""
    found = {}
    for top, _, names in os.walk(src, followlinks=True):
        for name in names:
            if name.endswith(".py") and "_pb2" not in name:
                path = Path(top, name)
                parts = path.relative_to(src).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """The full names that a file imports, anywhere in it: modules, and what is in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def imports(modules: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Pairs of modules, by full names, of which the first imports the second."""
    for module, path in modules.items():
        for name in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                yield module, target


def cycles(modules: Mapping[str, Path]) -> dict[str, list[Edge]]:
    """The imports that are part of a cycle, by level."""
    found: dict[str, list[Edge]] = {}
    pairs = list(imports(modules))
    for level in LEVELS:
        graph = networkx.DiGraph()
        for pair in pairs:
            one, other = (_at(level, name, modules[name]) for name in pair)
            if one != other:
                graph.add_edge(one, other)
        groups = networkx.strongly_connected_components(graph)
        group_of = {node: index for index, group in enumerate(groups) for node in group}
        found[level] = sorted(edge for edge in graph.edges if len({group_of[n] for n in edge}) == 1)
    return found


def _at(level: str, name: str, path: Path) -> str:
    """What a module belongs to at a level: `scheduler`, `scheduler/drafts`, or itself."""
    package, *parts = name.split(".")
    if path.name != "__init__.py" and level != "modules":
        parts = parts[:-1]
    # What lies in no folder of a distribution is a package of that name.
    parts = parts[:1] if level == "packages" else parts
    return "/".join(parts) or package


def lines(modules: Mapping[str, Path]) -> Counter[str]:
    """Lines of Python by package."""
    found = Counter[str]()
    for name, path in modules.items():
        found[_at("packages", name, path)] += len(path.read_text().splitlines())
    return found


def known(text: str) -> set[tuple[str, Edge]]:
    """The level and the import of each line: `modules: a/b -> a/c`."""
    entries = (line.replace(" -> ", ": ").split(": ") for line in text.splitlines())
    return {(level, (one, other)) for level, one, other in entries}


def listed(entries: Iterable[tuple[str, Edge]]) -> str:
    """The lines of what `known` reads."""
    return "".join(f"{level}: {one} -> {other}\n" for level, (one, other) in sorted(entries))


def main() -> int:
    """Exit status 1 if a cycle is new."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shrink", action="store_true", help="take old cycles off the list")
    options = parser.parse_args()
    modules = sources(ROOT / "src")
    counts = lines(modules)
    for package, count in sorted(
        {**counts, "all": counts.total()}.items(), key=lambda each: each[1]
    ):
        print(f"{count:8,} lines  {package}")
    found = {(level, edge) for level, edges in cycles(modules).items() for edge in edges}
    allowed = known(KNOWN.read_text())
    for level in LEVELS:
        edges = [edge for each, edge in found if each == level]
        groups = list(networkx.strongly_connected_components(networkx.DiGraph(edges)))
        print(f"{len(edges):8,} imports in cycles of {level}, which join {len(groups)} groups")
        for group in sorted(map(sorted, groups)):
            print(f"{'':10}{' '.join(group)}")
    if options.shrink:
        KNOWN.write_text(listed(found & allowed))
    if new := found - allowed:
        print(f"not in {KNOWN.name}, and so a new cycle:\n{listed(new)}", file=sys.stderr)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
