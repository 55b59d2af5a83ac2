"""Print which of the product's files and classes one plain streaming Generate runs through.

python tools/trace_path.py [--device cpu]

A pod on the embedded model streams 24 tokens, on a GPU as well where there is one. Counted are, by
process, the files of which a function is called between the request's arrival and its end, and the
classes that carry it: those of which an instance that was not there before is given to such a
function, or returned by one. The first call after the start and a later one are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # `python -P` leaves a script's own folder out

from demo import server  # noqa: E402
from torch.cuda import is_available  # noqa: E402

from tokenpod_client import Client  # noqa: E402

TOKENS = 24
#: A prompt for each call, so that none finds another's in the prefix cache.
PROMPTS = ("class Stack:\n    def ", "class Queue:\n    def ", "class Table:\n    def ")
ROLES = {"tokenpod serve": "front end", "tokenpod.engine.process": "engine"}


@dataclass(frozen=True)
class Run:
    """What one process ran in one call."""

    files: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)


def traced(device: str) -> list[dict[str, Run]]:
    """What each process ran, by its role, for each of PROMPTS."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "call").write_bytes(bytes(1))
        (folder / "sitecustomize.py").symlink_to(ROOT / "tools" / "trace_hook.py")
        path = os.pathsep.join([scratch, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": path, "TRACE_FOLDER": scratch, "TRACE_SRC": str(ROOT / "src")}
        with server("--device", device, variables=variables) as address:
            for pid in _processes(folder):
                with contextlib.suppress(ProcessLookupError):  # a child that is done
                    os.kill(pid, signal.SIGPROF)
            _calls(address, folder / "call")
        notes = [(folder / str(pid)).read_text() for pid in _processes(folder)]
    return [dict(_runs(notes, number)) for number in range(1, len(PROMPTS) + 1)]


def _processes(folder: Path) -> Iterator[int]:
    return (int(path.name) for path in folder.iterdir() if path.name.isdigit())


def _calls(address: str, number: Path) -> None:
    """Make the calls, one after the other; the file `number` says which is under way."""
    # Not truncated: the pod's processes have mapped it.
    with Client(address) as client, number.open("r+b", buffering=0) as under_way:
        client.model()  # connects
        for call, prompt in enumerate(PROMPTS, start=1):
            os.pwrite(under_way.fileno(), bytes([call]), 0)
            stream = client.generate(prompt, max_new_tokens=TOKENS)
            stream.text()
            os.pwrite(under_way.fileno(), bytes(1), 0)
            # An idle engine checks its state once per second: not in the next call.
            time.sleep(1.5)
            if (count := stream.finished[0].generated_token_count) != TOKENS:
                raise SystemExit(f"{prompt!r} got {count} tokens: {TOKENS} are needed")


def _runs(notes: list[str], number: int) -> Iterator[tuple[str, Run]]:
    for command, *lines in map(str.splitlines, notes):
        run = Run()
        for call, kind, name in map(str.split, lines):
            if int(call) == number:
                {"file": run.files, "class": run.classes}[kind].add(name)
        if run.files:
            yield next((role for words, role in ROLES.items() if words in command), command), run


def report(calls: list[dict[str, Run]]) -> Iterator[str]:
    """Counts and names of the last call, and how the first one differed."""
    first, last = calls[0], calls[-1]
    for role, run in sorted(last.items()):
        yield f"{role}: {len(run.files)} files, {len(run.classes)} classes"
        yield from (f"    {name}" for name in sorted(run.files) + sorted(run.classes))
        cold = sorted(run.files ^ first[role].files)
        yield f"    only in the first call, or not in it: {', '.join(cold) or 'no file'}"
    yield f"together: {len(set().union(*(run.files for run in last.values())))} files"


def main() -> int:
    """Trace a pod on each device that the machine has, or on the one that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    named = parser.parse_args().device
    for device in (named,) if named else ("cpu", "cuda") if is_available() else ("cpu",):
        print(f"on {device}", *report(traced(device)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
