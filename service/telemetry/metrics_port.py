"""The port from which Prometheus fetches metrics: HTTP, one page.

It is apart from all others, plaintext, without authentication, and off unless it has a number.
Threads of their own answer, so that a client that reads or writes slowly holds up nobody else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.telemetry.exposition import page_of
from tokenpod.service.telemetry.other_names import more_metrics
from tokenpod.service.telemetry.snapshots import FrontEndSnapshots, snapshot_of, summed

#: Connections at once; one more closes the oldest, so that slow clients can't keep others away.
_MOST_CONNECTIONS = 8
#: Seconds that a client may send and read nothing.
_SILENCE_SECONDS = 10.0
#: Seconds during which a page counts as new: a client that asks without a pause must not take the
#: processor from streams. llm-d's picker asks every 50 ms.
_FRESH_SECONDS = 0.025

#: From the header `Accept`: the page and its `Content-Type`.
MakePage = Callable[[str], tuple[bytes, str]]


class MetricsPort:
    """Listens on `address`; `page` makes what is served. Raises OSError."""

    def __init__(self, address: str, page: MakePage) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family, *_, where = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._server = _Server(where, family, _Fresh(page))
        thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="metrics-port", daemon=True
        )
        thread.start()

    @property
    def port(self) -> int:
        """Its number."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._server.shutdown()
        self._server.server_close()


class _Fresh:
    """Makes one page at a time, and none while the last one is new."""

    def __init__(self, page: MakePage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, tuple[bytes, str]]] = {}

    def __call__(self, accept: str) -> tuple[bytes, str]:
        with self._lock:
            made_at, page = self._made.get(accept, (0.0, (b"", "")))
            if time.monotonic() - made_at > _FRESH_SECONDS:
                page = self._page(accept)
                # One page is kept: a client could send any number of headers.
                self._made = {accept: (time.monotonic(), page)}
            return page


class _Server(HTTPServer):
    """A thread for each connection, of which there are few."""

    def __init__(self, where: tuple[Any, ...], family: int, page: MakePage) -> None:
        self.address_family = family
        self.page = page
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        super().__init__(where[:2], _Handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answer in a thread of its own."""
        with self._lock:
            self._open.append(request)
            crowded = len(self._open) > _MOST_CONNECTIONS
            oldest = self._open.pop(0) if crowded else None
        if oldest is not None:
            _hang_up(oldest)
        threading.Thread(
            target=self._answer, args=(request, client_address), name="metrics", daemon=True
        ).start()

    def server_close(self) -> None:
        """Close the port and all connections."""
        super().server_close()
        with self._lock:
            for request in self._open:
                _hang_up(request)

    def _answer(self, request: socket.socket, client_address: object) -> None:
        # An error says that the client is gone or too slow, or had to make room.
        with contextlib.suppress(OSError):
            self.finish_request(request, client_address)
        with self._lock, contextlib.suppress(ValueError):
            self._open.remove(request)
        self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tokenpod", ""
    timeout = _SILENCE_SECONDS
    # The head and the page are two writes, and the second would wait for the client's word, 40 ms.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """The page, under the path that scrapers ask for by default."""
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, explain="metrics are under /metrics")
            return
        assert isinstance(self.server, _Server)
        page, content_type = self.server.page(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Log nothing: a scrape is no event."""


def _hang_up(connection: socket.socket) -> None:
    """Let the thread that reads or writes here end, if it has not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# -- what a scrape gets ------------------------------------------------------------------------


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
