"""What fits into a device's memory."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.kernels.layouts import alike
from tokenpod.core.capacity import GIB, Capacity, capacity, choose_slots, fewest_ranks
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.model_size import Footprint, Portion
from tokenpod.core.own_state import OwnState
from tokenpod.core.windows import WholeTokens, WindowRoom
from tokenpod.kernels.cache.kv_pool import KVPool

#: Llama 3.1's 8B shape.
MODEL = Footprint(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    from_tensors=False,
    hidden_size=4096,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_positions=131_072,
    portions={
        1: Portion(8_030_261_248, 32 * 8 * 256),
        2: Portion(4_015_263_744, 32 * 4 * 256),
        4: Portion(2_007_764_992, 32 * 2 * 256),
        8: Portion(1_004_015_616, 32 * 1 * 256),
        16: Portion(518_918_144, 32 * 1 * 256),
        32: Portion(276_369_408, 32 * 1 * 256),
    },
)


def options(**changes: object) -> EngineOptions:
    usual = {
        "model_folder": "",
        "threads": 0,
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_batch_size": 512,
        "max_batch_prefill_tokens": 4096,
        "max_total_tokens": None,
        "max_batch_total_tokens": None,
        "memory_fraction": 0.9,
    }
    return EngineOptions(**{**usual, **changes})  # type: ignore[arg-type]


def h200(ranks: int = 1, **changes: object) -> Capacity:
    return capacity(MODEL, options(**changes), memory=int(139.8 * GIB), ranks=ranks)


def test_slots_are_a_share_of_what_is_free():
    asked = {"slot_bytes": 10, "wanted": None, "most_useful": 1000, "fraction": 0.5}
    assert choose_slots(**asked, free=1000) == 50 - PROBE_TOKENS


def test_there_are_no_more_slots_than_rows_can_use():
    asked = {"slot_bytes": 10, "wanted": None, "most_useful": 7, "fraction": 0.5}
    assert choose_slots(**asked, free=1000) == 7


@pytest.mark.parametrize(("wanted", "slots"), [(34, 34), (35, None)])
def test_slots_that_were_asked_for_fit_or_do_not(wanted: int, slots: int | None):
    asked = {"slot_bytes": 10, "most_useful": 1000, "fraction": 0.5, "free": 1000}
    assert choose_slots(**asked, wanted=wanted) == slots


def test_the_forecast_for_an_8b_model_on_an_h200_is_what_was_measured():
    # docs/sizing.md: bf16, 512 rows, memory-fraction 0.9.
    assert h200().slots == pytest.approx(897_272, rel=0.005)


#: Of the shape of gpt-oss-20b: a window of 128 tokens in every other layer.
WINDOWED = Footprint(
    architecture="GptOssForCausalLM",
    dtype="bfloat16",
    from_tensors=True,
    hidden_size=2880,
    intermediate_size=4 * 2880,
    vocab_size=201_088,
    max_positions=131_072,
    portions={1: Portion(20_900_000_000, 24 * 1024, window_numbers=12 * 1024)},
    window=128,
)


def test_layers_with_a_window_have_slots_for_all_rows_and_leave_others_the_rest():
    """Predicted of an H200 and 512 rows."""
    whole = msgspec.structs.replace(WINDOWED, window=None)
    asked = {"memory": int(139.8 * GIB), "ranks": 1}
    before, after = capacity(whole, options(), **asked), capacity(WINDOWED, options(), **asked)
    assert before.windows is None
    assert isinstance(after.windows, WindowRoom)
    assert after.windows.slots == (513 * (8 + 3 + 12) + 257) * 16
    assert (before.slot_bytes, after.slot_bytes) == (24 * 2048, 12 * 2048)
    assert after.window_bytes == 12 * 2048
    assert before.slots is not None
    assert after.slots is not None
    assert after.slots / before.slots > 1.85
    # Nothing is lost: together they take what the pool took.
    taken = after.slots * after.slot_bytes + after.windows.slots * after.window_bytes
    assert taken == pytest.approx(before.slots * before.slot_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host_kv_bytes": GIB}, "which the host's memory holds (--host-kv-bytes)"),
        ({"max_batch_total_tokens": 100_000}, "and there are 100000 in all (--max-batch-size)"),
        ({"max_batch_size": 8192}, "since windows of 8193 rows would take "),
    ],
)
def test_layers_with_a_window_have_all_slots_where_that_takes_less_memory(changes, why):
    asked = {"memory": int(139.8 * GIB), "ranks": 1}
    found = capacity(WINDOWED, options(**changes), **asked)
    assert str(found.windows).startswith("whole tokens, ")
    assert why in str(found.windows)
    assert (found.window_slots, found.slot_bytes) == (0, 24 * 2048)


def test_where_all_layers_have_a_window_rows_alone_bound_what_runs():
    portions = {1: Portion(7_240_000_000, 32 * 2048, window_numbers=32 * 2048)}
    mistral = msgspec.structs.replace(
        WINDOWED, portions=portions, window=4096, max_positions=32_768
    )
    found = capacity(mistral, options(max_batch_size=128), memory=int(139.8 * GIB), ranks=1)
    assert found.slot_bytes == 0
    assert found.slots == 128 * 32_768
    assert found.fits


def test_a_slot_takes_what_the_pool_says():
    pool = KVPool.bytes_per_slot(layouts=[alike(8, 128)] * 32, dtype=torch.bfloat16)
    assert MODEL.slot_bytes(1, "bfloat16") == pool


def test_a_rank_holds_its_portion():
    assert [MODEL.slot_bytes(n, "float16") for n in (1, 2, 8, 16)] == [
        131_072,
        65_536,
        16_384,
        16_384,
    ]
    assert MODEL.weight_bytes(2, 2) == 2 * MODEL.portions[2].numbers
    assert MODEL.parameters == MODEL.portions[1].numbers


def test_a_cache_of_8_bits_holds_twice_the_tokens():
    assert h200(kv_cache_dtype="fp8_e4m3").slots == pytest.approx(
        2 * h200().slots + PROBE_TOKENS, abs=1
    )


def test_a_device_too_small_for_the_weights_does_not_fit():
    found = capacity(MODEL, options(), memory=16 * GIB, ranks=1)
    assert found.free < 0
    assert not found.fits


def test_a_pool_too_small_for_the_longest_sequence_does_not_fit():
    on_l4 = {"memory": int(22.03 * GIB), "ranks": 1}
    assert capacity(MODEL, options(), **on_l4).fits
    assert not capacity(MODEL, options(max_total_tokens=65_536), **on_l4).fits


def test_a_pool_that_was_asked_for_and_does_not_fit_is_told():
    assert h200(max_batch_total_tokens=800_000).slots == 800_000
    too_many = h200(max_batch_total_tokens=1_000_000)
    assert too_many.slots is None
    assert not too_many.fits


def test_the_fewest_ranks_fit_and_divide_the_model():
    found = fewest_ranks(MODEL, options(), memory=int(14.56 * GIB))
    assert found is not None
    assert (found.ranks, found.fits) == (2, True)
    assert fewest_ranks(MODEL, options(), memory=GIB) is None


@given(
    memory=st.integers(1, 400).map(lambda gib: gib * GIB),
    rows=st.integers(1, 2048),
    prompt=st.integers(1, 1 << 15),
    ranks=st.sampled_from([1, 2, 4, 8, 16, 32]),
    fraction=st.floats(0.01, 0.99),
)
def test_what_fits_never_takes_more_than_there_is(
    memory: int, rows: int, prompt: int, ranks: int, fraction: float
):
    asked = options(max_batch_size=rows, max_batch_prefill_tokens=prompt, memory_fraction=fraction)
    found = capacity(MODEL, asked, memory=memory, ranks=ranks)
    if found.fits:
        assert found.weights + found.reserved + found.kv_bytes <= memory
        assert found.slots <= rows * MODEL.max_positions


@given(ranks=st.sampled_from([1, 2, 4, 8, 16]), memory=st.integers(1, 400))
def test_twice_the_ranks_never_hold_less(ranks: int, memory: int):
    one, two = (
        capacity(MODEL, options(), memory=memory * GIB, ranks=n) for n in (ranks, 2 * ranks)
    )
    assert two.free >= one.free
    assert two.fits or not one.fits


def chosen(model: Footprint, memory: float, **changes: object) -> Capacity:
    """What a GPU of so many GiB holds if nobody says how many sequences run at once."""
    asked = options(**{"max_batch_size": 1024, "fewer_rows": True, **changes})
    return capacity(model, asked, memory=int(memory * GIB), ranks=1)


def test_rows_are_as_many_as_have_memory_for_a_text_each():
    rows = [chosen(MODEL, memory).rows for memory in (22, 44, 79, 139.8)]
    assert rows == sorted(rows)
    assert rows[0] < 256
    assert rows[-2:] == [1024, 1024]
    for memory in (22, 44):
        found = chosen(MODEL, memory)
        assert found.slots is not None
        # Steps take some memory besides, which is counted later.
        assert found.slots > 128 * found.rows
        assert found.fits
    # What was asked for is not changed, and a small pool has few rows.
    assert h200(max_batch_size=1024).rows == 1024
    assert chosen(MODEL, 139.8, max_batch_total_tokens=40_000).rows == 128
    assert chosen(MODEL, 139.8, max_batch_total_tokens=40_000, max_total_tokens=64).rows == 576


#: Of the shape of Gemma 3 4B: a window of 1,024 tokens in 29 of 34 layers.
LONG_WINDOWS = msgspec.structs.replace(
    WINDOWED,
    vocab_size=262_208,
    portions={1: Portion(4_300_000_000, 34 * 2048, window_numbers=29 * 2048)},
    window=1024,
)


def test_rows_are_so_few_that_their_windows_take_half_of_the_memory():
    at_512 = capacity(LONG_WINDOWS, options(), memory=79 * GIB, ranks=1)
    found = chosen(LONG_WINDOWS, 79)
    assert isinstance(at_512.windows, WholeTokens)
    assert isinstance(found.windows, WindowRoom)
    assert 128 <= found.rows < 512
    windows = found.windows.slots * found.window_bytes
    assert windows <= 0.5 * 0.9 * found.memory
    assert found.slots is not None
    assert at_512.slots is not None
    assert found.slots > 2 * at_512.slots
    # Short windows cost little, and where few rows could have theirs all layers hold whole texts.
    assert chosen(WINDOWED, 139.8).rows == 1024
    assert isinstance(chosen(LONG_WINDOWS, 30).windows, WholeTokens)


def test_rows_leave_room_beside_their_states_for_snapshots_and_texts():
    states = {2: OwnState(row_bytes=52_000_000, token_bytes=0, pooled=True)}
    model = msgspec.structs.replace(MODEL, states=states)
    found = chosen(model, 139.8)
    assert 256 < found.rows < 1024
    assert found.rows * 52_000_000 <= 0.9 * found.memory / 4
    assert found.reserve["states"] > 1.3 * found.rows * 52_000_000
