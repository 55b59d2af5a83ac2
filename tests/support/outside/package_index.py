"""Package indexes of small wheels on this machine, for what calls pip."""

from __future__ import annotations

import contextlib
import functools
import threading
import zipfile
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def add_wheel(index: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    """Put a wheel with one module into the folder of an index; its path."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)
    return path


class _Listing(SimpleHTTPRequestHandler):
    """A folder of folders of wheels; its listings are what pip takes for an index."""

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve_index(folder: Path) -> Iterator[str]:
    """The address of an index that serves `folder`."""
    handler = functools.partial(_Listing, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
