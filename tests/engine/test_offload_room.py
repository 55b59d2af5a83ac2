"""Memory for keys and values on the host that there is not, or that a model has no use for."""

from __future__ import annotations

import pytest

from support.checkpoints.demo import DEMO
from support.engines import small_engines
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.startup.offload_room import check_offload_room

pytestmark = pytest.mark.compute


def refused(given):
    with pytest.raises(EngineError) as told:
        small_engines.Engine(DEMO, host_kv_bytes=given)
    return str(told.value)


def test_more_than_there_is_is_refused_before_anything_is_loaded():
    options = EngineOptions("", None, "cpu", 1, 1, 1, host_kv_bytes=1 << 50)
    with pytest.raises(EngineError, match=r"^--host-kv-bytes is 1125899906842624: .* are free "):
        check_offload_room(options)
    assert refused(1 << 50).startswith("--host-kv-bytes is 1125899906842624: ")


def test_less_than_one_block_is_refused():
    assert refused(1000) == "--host-kv-bytes is 1000: 64 tokens take 256.0 KiB"


def test_whole_blocks_of_it_are_used():
    assert small_engines.Engine(DEMO, host_kv_bytes=(8 << 20) + 5000).limits.offload_slots == 2048
