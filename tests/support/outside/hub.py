"""A Hugging Face hub of one repository: what huggingface_hub asks of one for a download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """What it holds, how it behaves, and what was asked of it."""

    files: dict[str, bytes]
    name: str = "org/model"
    branches: tuple[str, ...] = ("main", "v2")
    #: Needed for everything; None: none is.
    token: str | None = None
    #: A file that is sent as far as half, and no further until `go_on`.
    stalls: str = ""
    #: A file whose bytes are not those of its digest.
    corrupt: str = ""
    url: str = ""
    #: Paths, with the range that was asked for.
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def about(self) -> dict[str, object]:
        """The API's description of the repository."""
        siblings = []
        for name, data in self.files.items():
            about: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": name}
            if name.endswith((".safetensors", ".bin")):
                digest = hashlib.sha256(data).hexdigest()
                about["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 1}
            siblings.append(about)
        return {"id": self.name, "sha": COMMIT, "siblings": siblings}


@contextmanager
def hub_of(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub that listens while the body runs."""
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append((path, self.headers["Range"]))
            api = f"/api/models/{hub.name}/revision/"
            file = f"/{hub.name}/resolve/{COMMIT}/"
            if hub.name not in path:
                self._refuse(404, "RepoNotFound")
            elif hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
                self._refuse(403, "GatedRepo")
            elif path.startswith(api):
                if path.removeprefix(api) in (*hub.branches, COMMIT):
                    self._answer(200, json.dumps(hub.about()).encode())
                else:
                    self._refuse(404, "RevisionNotFound")
            elif (name := path.removeprefix(file)) in hub.files:
                self._send(name)
            else:
                self._refuse(404, "EntryNotFound")

        def _send(self, name: str) -> None:
            data = hub.files[name]
            if name == hub.corrupt:
                data = b"\0" * len(data)
            asked = self.headers["Range"]
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            status, rest = (206, data[start:]) if asked else (200, data)
            if name != hub.stalls or hub.go_on.is_set():
                self._answer(status, rest)
                return
            self._head(status, len(rest))
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            hub.stalled.set()
            hub.go_on.wait()
            self.close_connection = True

        def _answer(self, status: int, data: bytes) -> None:
            self._head(status, len(data))
            self.wfile.write(data)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _head(self, status: int, size: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size))
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    return Handler
