"""What a row of the device's sampler is set with: numpy arrays, as the kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenpod.engine.row_sampling import RowSampling
from tokenpod.kernels.triton import sampling_rows, top_tokens

Ints = npt.NDArray[np.int64]


def words(
    asks: RowSampling, prompt: Sequence[int], outputs: Sequence[int], vocab_size: int
) -> Ints:
    """A row as `tokenpod.kernels.triton.sampling_rows` lays it out."""
    params = asks.params
    last = [*prompt[-1:], *outputs[-1:]][-1:]
    flags = (
        params.do_sample * sampling_rows.SAMPLES.value
        + (params.do_sample and asks.truncates) * sampling_rows.CUTS.value
        + asks.edited * sampling_rows.EDITED.value
        + asks.counted * sampling_rows.COUNTED.value
        + params.watermark * sampling_rows.WATERMARKED.value
        + asks.tops_processed * sampling_rows.PROCESSED_TOPS.value
    )
    seed = np.array(params.seed, np.uint64).view(np.int64)
    integers = {
        sampling_rows.FLAGS: flags,
        sampling_rows.SEED: int(seed),
        sampling_rows.STREAM: asks.stream,
        sampling_rows.MIN_NEW_TOKENS: asks.min_new_tokens,
        sampling_rows.BIASES: len(params.logit_bias),
        sampling_rows.ENDS: len(asks.ends) if asks.min_new_tokens else 0,
        sampling_rows.TOP_K: params.top_k if params.top_k < vocab_size else 0,
        sampling_rows.TOP_N: min(asks.top_n, top_tokens.MOST_TOP_TOKENS.value),
        sampling_rows.LENGTH: len(prompt) + len(outputs),
        sampling_rows.PREVIOUS: last[0] if last else 0,
    }
    floats = {
        sampling_rows.TEMPERATURE: max(params.temperature, float(np.finfo(np.float32).tiny)),
        sampling_rows.TOP_P: params.top_p,
        sampling_rows.FLOOR: math.log(params.min_p) if params.min_p else -math.inf,
        sampling_rows.TYPICAL_P: params.typical_p,
        sampling_rows.REPETITION: params.repetition_penalty,
        sampling_rows.PRESENCE: params.presence_penalty,
        sampling_rows.FREQUENCY: params.frequency_penalty,
        sampling_rows.RELATIVE_FREQUENCY: params.relative_frequency_penalty,
    }
    row = np.zeros(sampling_rows.WORDS.value, np.int64)
    for place, integer in integers.items():
        row[place.value] = integer
    for place, real in floats.items():
        row.view(np.float64)[place.value] = real
    return row


def counts(prompt: Sequence[int], outputs: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """[vocab] occurrences: in the prompt above, in the output below, 16 bits each."""
    most = sampling_rows.MOST_COUNT.value
    halves = [
        np.minimum(np.bincount(np.array(tokens, np.int64), minlength=vocab_size), most)
        for tokens in (prompt, outputs)
    ]
    packed: npt.NDArray[np.int32] = (halves[0] << 16 | halves[1]).astype(np.uint32).view(np.int32)
    return packed
