"""Adapters neither come nor go while the server drains, nor where that is not switched on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenpod.service.admission.admission import Admission
from tokenpod.service.calls.errors import FailedPrecondition, Unavailable
from tokenpod.service.serving.adapter_admin import AdapterAdmin


def admin(token_file: Path | None, *, drains: bool) -> AdapterAdmin:
    admission = Admission(max_requests=9, max_queue_tokens=9)
    admission.closed = None
    if drains:
        admission.drain()
    serving: Any = SimpleNamespace(settings=SimpleNamespace(adapter_token_file=token_file))
    return AdapterAdmin(serving, admission)


async def test_a_server_that_drains_loads_and_unloads_nothing(tmp_path: Path) -> None:
    draining = admin(tmp_path / "tokens", drains=True)
    for change in (draining.load("sql", "sql", ""), draining.unload("sql")):
        with pytest.raises(Unavailable, match="drain"):
            await change


def test_without_tokens_the_flag_is_named() -> None:
    with pytest.raises(FailedPrecondition, match="--adapter-token-file switches that on"):
        admin(None, drains=False)
