"""Which store an address means."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tokenpod.service.download.store import DownloadError, Store

_URL = re.compile(r"([a-z][a-z0-9]*)://.+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
#: By scheme: the library that fsspec asks, and the extra of this package that has it.
STORES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "az": ("adlfs", "az")}


def store_of(model: str, revision: str | None = None, *, token_file: Path | None = None) -> Store:
    """The store of a model: `org/name` on a hub, or `s3://`, `gs://` or `az://` and a path.

    `token_file` holds a token of the hub; without it HF_TOKEN and HF_TOKEN_PATH do. Other stores
    read their own variables. Raises DownloadError for an address of neither kind.
    """
    url = _URL.fullmatch(model)
    if url is None:
        if not _HUB_NAME.fullmatch(model):
            raise DownloadError(f"{model} is neither a name on a hub (org/name) nor a URL")
        # Only when it is asked for: the libraries take a while to import.
        from tokenpod.service.download.hub import Hub

        return Hub(model, revision or "main", token=_token(token_file))
    if url[1] not in STORES:
        known = ", ".join(f"{scheme}://" for scheme in STORES)
        raise DownloadError(f"{model}: {url[1]}:// is not supported (supported: {known})")
    if revision is not None:
        raise DownloadError(f"--revision is {revision}: only models of a hub have revisions")
    library, extra = STORES[url[1]]
    if find_spec(library) is None:
        hint = f"pip install 'tokenpod[{extra}]'"
        raise DownloadError(f"{model}: {url[1]}:// needs the package {library}: {hint}")
    from tokenpod.service.download.object_store import ObjectStore

    return ObjectStore(model)


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise DownloadError(f"--token-file is {path}: it can't be read ({error})") from None
    if not token or not token.isascii() or any(mark.isspace() for mark in token):
        raise DownloadError(f"--token-file is {path}: it holds no token on one line")
    return token
