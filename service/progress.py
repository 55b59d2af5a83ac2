"""The bar that shows how far loading has come."""

from __future__ import annotations

import sys

from tqdm import tqdm

from tokenpod.core.messages import Loading


class LoadingBar:
    """Bytes of weights on a terminal; silent where standard error is none."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._bar: tqdm[None] | None = None

    def update(self, loading: Loading) -> None:
        """Show progress; the first call draws the bar."""
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

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
