"""A process that makes a model's folder of files, and answers with one line of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenpod.core.staging import StagingError, staging
from tokenpod_client.cli.errors import print_error


class ChildError(Exception):
    """It could not be done; one line."""


def made(
    folder: Path,
    command: Sequence[str],
    job: dict[str, Any],
    *,
    seconds: int | None = None,
    limit: str = "",
) -> dict[str, Any] | None:
    """Have a process fill `folder`, which appears whole; what it says. None: the error is printed.

    Args:
        command: of the process; its argument is the job, with the folder to fill.
        job: what it does, with its `source`.
        seconds, limit: that it may take, None: any; and what is said if it takes longer.
    """
    try:
        with staging(folder) as part:
            text = json.dumps({**job, "folder": str(part.folder)})
            done = _answer_of([*command, text], job["source"], seconds=seconds, limit=limit)
            part.finish()
            return done
    except (StagingError, ChildError) as error:
        print_error(str(error))
    except OSError as error:
        print_error(f"{folder}: {error.strerror or error}")
    return None


def _answer_of(
    command: Sequence[str], source: str, *, seconds: int | None, limit: str
) -> dict[str, Any]:
    """What a process says; ChildError if it says nothing, or what is wrong."""
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
