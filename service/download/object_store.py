"""Object stores, through fsspec."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, BinaryIO

import fsspec

from tokenpod.service.download.store import DownloadError, Remote

#: Bytes of one request.
_PIECE = 16 << 20


class ObjectStore:
    """A folder of a store. Credentials, region and endpoint are the store's own variables."""

    revision = None

    def __init__(self, url: str) -> None:
        self.source = url.rstrip("/")
        # The libraries log what they raise, too.
        for name in ("s3fs", "gcsfs", "adlfs", "aiobotocore"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._store: Any
            self._store, self._root = fsspec.core.url_to_fs(
                self.source, use_listings_cache=False, skip_instance_cache=True
            )
        except Exception as error:
            raise self._unreachable(error) from None

    def files(self) -> Sequence[Remote]:
        """Every file below the folder."""
        try:
            found = self._store.find(self._root, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise self._unreachable(error) from None
        root = self._root.rstrip("/") + "/"
        files = [
            Remote(path.removeprefix(root), int(about["size"]), _version(about))
            for path, about in found.items()
            if path.startswith(root)
        ]
        if not files:
            raise DownloadError(f"{self.source}: there is no such folder, or it is empty")
        return files

    def fetch(self, file: Remote, out: BinaryIO, offset: int) -> None:
        """Append a file's bytes from `offset` on, a piece for each request."""
        path = f"{self._root.rstrip('/')}/{file.name}"
        while offset < file.size:
            end = min(offset + _PIECE, file.size)
            try:
                piece = self._store.cat_file(path, start=offset, end=end)
            except Exception as error:
                raise self._unreachable(error, file.name) from None
            if len(piece) != end - offset:
                raise DownloadError(f"{self.source}/{file.name}: it has changed meanwhile")
            out.write(piece)
            offset = end

    def _unreachable(self, error: Exception, name: str | None = None) -> DownloadError:
        # Each library has errors of its own kinds.
        where = f"{self.source}/{name}" if name else self.source
        said = str(error) or type(error).__name__
        return DownloadError(f"{where}: can't be read ({said})", resumable=True)


def _version(about: dict[str, Any]) -> str:
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "created")
    return next((str(about[name]) for name in names if about.get(name)), "")
