"""How far loading has come: a bar on a terminal, lines in a log."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from tqdm import tqdm

from tokenpod.core.messages import Loading

log = logging.getLogger("tokenpod")

#: Seconds between two lines.
_LINE_SECONDS = 3.0


class LoadingBar:
    """Bytes of weights on a terminal; where standard error is none, `tell` writes lines."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._bar: tqdm[None] | None = None
        self._loading: Loading | None = None
        self._began = time.monotonic()

    def update(self, loading: Loading) -> None:
        """Show progress; the first call draws the bar."""
        self._loading = loading
        if self._bar is None:
            self._bar = tqdm(
                desc=f"Loading {self._model_id}",
                total=loading.total_bytes,
                unit="B",
                unit_scale=True,
                disable=not sys.stderr.isatty(),
                leave=False,
            )
        self._bar.update(loading.done_bytes - self._bar.n)

    async def tell(self) -> None:
        """Log what is being done and how far it has come, until cancelled."""
        if sys.stderr.isatty():
            return
        while True:
            log.info("loading", extra=self._so_far())
            await asyncio.sleep(_LINE_SECONDS)

    def _so_far(self) -> dict[str, object]:
        seconds = {"seconds": round(time.monotonic() - self._began)}
        loading = self._loading
        if loading is None:
            return {"model_id": self._model_id, "stage": "starting the engine", **seconds}
        if loading.done_bytes >= loading.total_bytes:
            return {"model_id": self._model_id, "stage": "warming up", **seconds}
        return {
            "model_id": self._model_id,
            "stage": "reading weights",
            "percent": 100 * loading.done_bytes // loading.total_bytes,
            "done_bytes": loading.done_bytes,
            "total_bytes": loading.total_bytes,
            **seconds,
        }

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
