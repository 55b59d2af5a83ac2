"""How far a download has come: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time

from tqdm import tqdm

log = logging.getLogger("tokenpod")

#: Seconds between two lines.
_LINE_SECONDS = 5.0


class DownloadBar:
    """Bytes of `model`; called from several threads."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._bar: tqdm[None] | None = None
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """`done` bytes of `total` are there."""
        with self._lock:
            if not sys.stderr.isatty():
                self._line(done, total)
                return
            if self._bar is None:
                name = f"Downloading {self._model}"
                self._bar = tqdm(desc=name, total=total, initial=done, unit="B", unit_scale=True)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= _LINE_SECONDS:
            self._told = now
            about = {"model": self._model, "done_bytes": done, "total_bytes": total}
            log.info("downloading", extra={**about, "percent": 100 * done // max(total, 1)})
