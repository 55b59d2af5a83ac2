"""The folders of service/ lie in layers: each imports those below it alone."""

from __future__ import annotations

from pathlib import Path

from shape import imported

SERVICE = Path(__file__).parents[2] / "service"
#: From the lowest to the highest; "" are the modules of service/ itself.
LAYERS = (
    *("config", "calls", "download", "admission", "constraints", "workers", "images"),
    *("text", "pod", "rpc", "telemetry", "serving", "dialects", ""),
)


def folder(parts: tuple[str, ...]) -> str:
    """The folder of a module, by its path below service/."""
    return parts[0] if len(parts) > 1 else ""


def imports() -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports the second."""
    found = set()
    for path in SERVICE.rglob("*.py"):
        own = folder(path.relative_to(SERVICE).parts)
        for name in imported(path):
            if name.startswith("tokenpod.service."):
                parts = name.removeprefix("tokenpod.service.").split(".")
                other = parts[0] if (SERVICE / parts[0]).is_dir() else ""
                found.add((own, other))
    return found


def test_each_folder_has_its_layer() -> None:
    folders = {path.parent.name for path in SERVICE.glob("*/__init__.py")}
    assert folders == set(LAYERS) - {""}


def test_a_folder_imports_those_below_it_alone() -> None:
    wrong = {(one, other) for one, other in imports() if LAYERS.index(one) < LAYERS.index(other)}
    assert wrong == set()


def test_calls_are_the_leaf() -> None:
    assert {other for one, other in imports() if one == "calls"} == {"calls"}
