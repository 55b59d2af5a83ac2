"""What a start tells its operator, and limits that the model can't keep."""

from __future__ import annotations

import msgspec
import pytest

from tokenpod.core.messages import Ready
from tokenpod.core.task import Task
from tokenpod.service.config.sources import SettingsError, load_settings
from tokenpod.service.overview import overview
from tokenpod.service.serving.serving import check_limits, request_limits

READY = Ready("float32", "float32", "cpu", "contiguous", None, 100, 128, 1000, 1, 4, 0.1, 0.1)


def told(ready: Ready = READY, **flags: object) -> dict[str, str]:
    settings = load_settings(device="cpu", **flags)
    lines = overview(settings, ready, request_limits(settings, ready), "host:1")
    rows = [line.split("  ", 1) for line in lines]
    assert len({len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines}) == 1
    return {name: value.strip() for name, value in rows}


def test_the_table_has_the_model_and_every_limit_as_it_is_in_force() -> None:
    rows = told(model_id="/models/some", max_top_n_tokens=9, max_best_of=3)
    assert (rows["model"], rows["address"]) == ("/models/some", "host:1")
    assert (rows["context"], rows["KV cache"][:11]) == ("128 tokens", "1000 tokens")
    assert (rows["--max-input-tokens"], rows["--max-total-tokens"]) == ("127", "128")
    assert (rows["--max-top-n-tokens"], rows["--max-best-of"]) == ("9", "3")
    assert rows["--max-concurrent-requests"] == "256"


def test_what_a_model_is_for_is_said_where_it_writes_no_text() -> None:
    assert "task" not in told()
    assert told(msgspec.structs.replace(READY, task=Task.EMBED))["task"] == "embed"


def test_a_step_has_the_size_that_the_engine_has_found() -> None:
    small = msgspec.structs.replace(READY, prefill_tokens=128)
    assert told(small)["--max-batch-prefill-tokens"] == "128"


def test_a_start_without_a_model_says_what_is_served_and_how_another_is() -> None:
    assert "`tokenpod serve MODEL` serves another" in told()["model"]
    assert told(model_id="demo")["model"] == "demo"
    assert told(served_model_name="mine")["name for clients"] == "mine"


def test_a_limit_that_the_model_or_the_cache_cannot_keep_is_an_error() -> None:
    small = msgspec.structs.replace(READY, slots=100)
    for flags, ready, problem in (
        ({"max_input_tokens": 128}, READY, "--max-input-tokens is 128: a prompt and its output"),
        ({"max_total_tokens": 101}, small, "--max-total-tokens is 101: the KV cache holds 100"),
        ({"max_input_tokens": 100}, small, "--max-input-tokens is 100: "),
    ):
        with pytest.raises(SettingsError, match=problem):
            check_limits(load_settings(device="cpu", **flags), ready)
    check_limits(load_settings(max_input_tokens=127, max_total_tokens=128), READY)
