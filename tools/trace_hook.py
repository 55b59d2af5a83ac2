"""Runs in each process of a traced pod, as its `sitecustomize`: notes what a call runs.

TRACE_FOLDER has a file `call` of one byte, the number of the call under way, 0 between calls. Each
process writes there, to a file of its pid: its command, then a line for each thing it saw first in
a call, `1 file scheduler/planners/queue.py` or `1 class tokenpod.core.requests.Request`.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Trace:
    """What one process does in calls."""

    def __init__(self, folder: Path, src: Path) -> None:
        """Start the process's file; frames are looked at from `start` on."""
        self._call = mmap.mmap(os.open(folder / "call", os.O_RDWR), 1)
        self._notes = os.open(folder / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._product = [f"{src / name}/" for name in ("tokenpod", "tokenpod_client")]
        self._files: dict[CodeType, str | None] = {}
        self._number, self._noted = 0, set[str]()
        self._there: dict[int, object] = {}
        self._write(" ".join(sys.orig_argv))

    def start(self, *_: object) -> None:
        """Look at the frames of this thread, which got a signal."""
        sys.setprofile(self.see)

    def see(self, frame: FrameType, event: str, value: Any) -> None:
        """A profile function: notes a function of the product, its arguments or its result."""
        number = self._call[0]
        if not number or event not in ("call", "return"):
            return
        code = frame.f_code
        if (file := self._files.get(code, "")) == "":
            file = self._files[code] = self._file(code)
        if file is None:
            return
        if number != self._number:
            self._number, self._noted = number, set()
            gc.unfreeze()  # what is frozen is not listed
            # They are kept, so that nothing new gets their ids.
            self._there = {id(each): each for each in gc.get_objects() if _is_ours(type(each))}
        self._note(f"{number} file {file}")
        for each in _arguments(frame) if event == "call" else (value,):
            if _is_ours(kind := type(each)) and id(each) not in self._there:
                self._note(f"{number} class {kind.__module__}.{kind.__qualname__}")

    def _file(self, code: CodeType) -> str | None:
        """The product's file that a function is in; none if it is another's, or an import."""
        starts = [each for each in self._product if code.co_filename.startswith(each)]
        if not starts or code.co_name == "<module>" or "_pb2" in code.co_filename:
            return None
        return code.co_filename.removeprefix(starts[0])

    def _note(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._write(line)

    def _write(self, line: str) -> None:
        os.write(self._notes, f"{line}\n".encode())


def _arguments(frame: FrameType) -> Iterator[Any]:
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (values[name] for name in names if name in values)


def _is_ours(kind: type[Any]) -> bool:
    return str(kind.__module__).partition(".")[0] in ("tokenpod", "tokenpod_client")


if __name__ == "sitecustomize":
    trace = Trace(Path(os.environ["TRACE_FOLDER"]), Path(os.environ["TRACE_SRC"]))
    # A profile slows the start down, so the main thread gets it by a signal; others are few.
    signal.signal(signal.SIGPROF, trace.start)
    threading.setprofile(trace.see)
