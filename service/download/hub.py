"""Repositories of a Hugging Face hub."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import httpx2 as httpx
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from tokenpod.service.download.store import DownloadError, Remote


class Hub:
    """A model on the hub that HF_ENDPOINT names, or the public one.

    Args:
        name: `org/name`.
        revision: branch, tag or commit.
        token: None: what HF_TOKEN or the file HF_TOKEN_PATH hold, if anything.
        endpoint: None: HF_ENDPOINT.
    """

    def __init__(
        self, name: str, revision: str, *, token: str | None = None, endpoint: str | None = None
    ) -> None:
        self.source, self.revision = name, revision
        self._token = token
        self._endpoint = endpoint or constants.ENDPOINT
        self._commit = revision
        # Downloads have one bar, and one line for what fails.
        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)

    def files(self) -> Sequence[Remote]:
        """Every file of the commit that the revision names."""
        api = HfApi(endpoint=self._endpoint, token=self._token)
        try:
            found = api.model_info(self.source, revision=self.revision, files_metadata=True)
        except Exception as error:
            raise self._refused(error) from None
        self._commit = found.sha or self.revision
        return [
            Remote(
                each.rfilename,
                each.size or 0,
                each.blob_id or self._commit,
                each.lfs.sha256 if each.lfs else None,
            )
            for each in found.siblings or ()
        ]

    def fetch(self, file: Remote, out: BinaryIO, offset: int) -> None:
        """Append a file's bytes from `offset` on."""
        where = f"{self.source}/resolve/{quote(self._commit, safe='')}/{quote(file.name)}"
        url = f"{self._endpoint}/{where}"
        try:
            http_get(
                url,
                out,
                resume_size=offset,
                headers=build_hf_headers(token=self._token),
                expected_size=file.size,
                displayed_filename=file.name,
                _tqdm_bar=cast(Any, _NoBar()),
            )
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, httpx.HTTPError):
                raise
            raise self._refused(error, file.name) from None

    def _refused(self, error: Exception, file: str | None = None) -> DownloadError:
        """What to tell of a library's error, whose texts have several lines."""
        what = f"{self.source}/{file}" if file else self.source
        hub = self._endpoint
        if isinstance(error, GatedRepoError):
            text = f"{what}: access to this model is restricted on {hub}; give the token of an"
            return DownloadError(f"{text} account that has been granted it")
        if isinstance(error, RevisionNotFoundError):
            return DownloadError(f"{self.source} has no revision {self.revision} on {hub}")
        if isinstance(error, RepositoryNotFoundError):
            text = f"{hub} has no model {self.source}, or it is private and needs a token"
            return DownloadError(text)
        if isinstance(error, OfflineModeIsEnabled):
            return DownloadError(f"{what}: HF_HUB_OFFLINE is set: nothing is downloaded")
        if isinstance(error, HFValidationError):
            return DownloadError(f"{what} is no name of a model")
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            return DownloadError(f"{what}: {hub} answered with status {status}", resumable=True)
        said = str(error) or type(error).__name__
        return DownloadError(f"{what}: {hub} can't be reached ({said})", resumable=True)


class _NoBar:
    """In place of the library's bar."""

    def update(self, count: int) -> None:
        """Nothing is shown."""
