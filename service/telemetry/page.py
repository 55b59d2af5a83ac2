"""What a scrape gets: the pod's metrics, under our names and those that were asked for."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.exposition import page_of
from tokenpod.service.telemetry.other_names import more_metrics
from tokenpod.service.telemetry.snapshots import FrontEndSnapshots, snapshot_of, summed


class Page:
    """Makes pages; one at a time.

    Args:
        settings: say which names there are.
        reader: of this process, the first front end.
        front_ends: the other ones.
    """

    def __init__(
        self, settings: ServerSettings, reader: InMemoryMetricReader, front_ends: FrontEndSnapshots
    ) -> None:
        self._more = more_metrics(settings)
        self._reader = reader
        self._front_ends = front_ends

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that `accept` asks for, and its `Content-Type`."""
        pod = summed([snapshot_of(self._reader), *self._front_ends.read()])
        return page_of(pod, accept, self._more)
