"""Adapters that come and go while serving: what is checked before the engine is asked."""

from __future__ import annotations

import bisect
import re
from pathlib import Path

from tokenpod.core.adapter_files import CONFIG, folder_within
from tokenpod.core.messages import AdapterDone, AdapterFacts, LoadAdapter, UnloadAdapter
from tokenpod.core.outputs import FailureCode
from tokenpod.service.admission.admission import Admission
from tokenpod.service.calls.errors import (
    RETRY_SECONDS,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from tokenpod.service.config.resolved import MOST_ADAPTER_NAME_BYTES
from tokenpod.service.serving.adapters import Adapters
from tokenpod.service.serving.serving import Serving

MOST_LISTED, USUALLY_LISTED = 1000, 100
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def page_of(adapters: Adapters, size: int, after: str) -> tuple[list[AdapterFacts], str]:
    """Adapters behind the one named `after`, and where to go on; "": there are no more."""
    if size > MOST_LISTED:
        raise InvalidArgument("page_size", f"is {size}; at most {MOST_LISTED} are listed")
    loaded, size = adapters.loaded, size or USUALLY_LISTED
    start = bisect.bisect_right([each.name for each in loaded], after) if after else 0
    page = loaded[start : start + size]
    return page, page[-1].name if start + size < len(loaded) else ""


class AdapterAdmin:
    """Loads and unloads the adapters of a pod that leads.

    Args:
        serving: engine and settings.
        admission: says whether the server drains.

    Raises:
        FailedPrecondition: the operator has not switched it on.
    """

    def __init__(self, serving: Serving, admission: Admission) -> None:
        if serving.settings.adapter_token_file is None:
            raise FailedPrecondition(
                "adapters are not loaded while serving: --adapter-token-file switches that on"
            )
        self._serving, self._admission = serving, admission

    async def load(self, name: str, path: str, digest: str) -> AdapterFacts:
        """Load what lies at `path` below the operator's folder; `digest`: "" or the one expected.

        Raises InvalidArgument, ResourceExhausted or Unavailable; then nothing has changed.
        """
        self._admission.check_open()
        self._check_open()
        _check_name(name)
        self._check_path(path)
        match = _DIGEST.fullmatch(digest)
        if digest and match is None:
            raise InvalidArgument("digest", "is not `sha256:` and 64 hexadecimal digits")
        client = self._serving.client
        wanted = LoadAdapter(client.new_op(), name, path, match[1] if match else "")
        done = await client.change_adapters(wanted)
        if done.facts is None:
            raise _error(done, "path")
        return done.facts

    async def unload(self, name: str) -> None:
        """Unload, once the last request that has it has ended. Raises NotFound or Unavailable."""
        self._admission.check_open()
        self._serving.adapters.find(name)
        if not name:
            raise InvalidArgument("name", "is empty")
        self._check_open()
        # Requests that come from here on must not reach the engine behind the adapter's end.
        self._serving.adapters.remove(name)
        client = self._serving.client
        done = await client.change_adapters(UnloadAdapter(client.new_op(), name))
        if done.failure is not None:
            raise _error(done, "name")

    def _check_open(self) -> None:
        if self._serving.settings.lora_fuse:
            raise FailedPrecondition("an adapter is fused into the model: none comes or goes")

    def _check_path(self, path: str) -> None:
        root = self._serving.settings.adapter_folder
        assert root is not None, "a rule of the settings"
        if not path:
            raise InvalidArgument("path", "is empty")
        try:
            folder = folder_within(str(root), path)
            found = (Path(folder) / CONFIG).is_file()
        except (ValueError, OSError):
            folder, found = None, False
        if folder is None or not found:
            problem = f"is {path[:200]!r}: below --adapter-folder there is no adapter of that path"
            raise InvalidArgument("path", problem)


def _check_name(name: str) -> None:
    size = len(name.encode())
    fine = 1 <= size <= MOST_ADAPTER_NAME_BYTES and name.isprintable() and name == name.strip()
    if not fine or set(name) & {",", "="}:
        raise InvalidArgument(
            "name", f"is not 1 to {MOST_ADAPTER_NAME_BYTES} printable bytes without `,` and `=`"
        )


def _error(done: AdapterDone, field: str) -> ServiceError:
    match done.failure:
        case FailureCode.NOT_FOUND:
            return NotFound("adapter", "", done.message)
        case FailureCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(done.message, limit="max_loaded_adapters")
        case FailureCode.UNAVAILABLE:
            return Unavailable(done.message, retry_after=RETRY_SECONDS)
    error = InvalidArgument(field, done.message)
    error.message = done.message
    return error
