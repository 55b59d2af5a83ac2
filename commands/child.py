"""A process that works on a model's files, and answers with one line of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


class ChildError(Exception):
    """It could not be done; one line."""


def answer_of(
    command: Sequence[str], source: str, *, seconds: int | None = None, limit: str = ""
) -> dict[str, Any]:
    """What a process says.

    Args:
        command: of the process.
        source: what it works on, for errors.
        seconds: that it may take; None: any.
        limit: what is said if it takes longer.

    Raises ChildError if it says nothing, or what is wrong.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{source}: {limit}") from None
    finally:
        process.kill()
        process.wait()
    try:
        done: dict[str, Any] = json.loads(said)
    except ValueError:
        out_of_time = limit and process.returncode == -signal.SIGXCPU
        raise ChildError(f"{source}: {limit if out_of_time else _ended(process)}") from None
    if "error" in done:
        raise ChildError(done["error"])
    return done


def _ended(process: subprocess.Popen[str]) -> str:
    status = process.returncode
    if status < 0:
        name = signal.Signals(-status).name
        return f"its process was ended by {name}, perhaps for want of memory"
    return f"its process ended with status {status}"
