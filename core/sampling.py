"""Sampling parameters: one table, from which the columns of both samplers are made.

A knob is a field of `SamplingParams`, annotated with a `Knob`. From it follow its column in each
row of a sampler's state, on the host and on a device alike, what a client may ask for, and which
of the sampler's stages a row needs. docs/extend.md says how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

#: Most likely tokens that are reported at a position at most, ties with the last one included.
MOST_TOP_TOKENS = 64

#: A row's state is so many 64-bit words: two cache lines of a GPU, with room for more knobs.
ROW_WORDS = 32

#: How much an end's logit grows by at most, in multiples of itself.
MOST_BOOST = 1e6

#: Of float32.
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)


#: An entry of a bad word: its token above so many bits, and what they say.
BAD_WORD_BITS = 2
BEGINS_WORD = 1
ENDS_WORD = 2

#: What a row needs, as bits of its column `flags`.
#: The token is drawn at random; otherwise it is the one with the highest score.
DRAWS = 1
#: Tokens are taken out before the draw.
CUTS = 2
#: Scores are changed before temperature.
EDITED = 4
#: They are changed by how often tokens have occurred.
COUNTED = 8
#: Top tokens are reported, and are of the distribution that is drawn from.
PROCESSED_TOPS = 16
#: More than the token is reported: its log probability, its rank, or top tokens.
REPORTED = 32


class Stage(Enum):
    """Where a knob applies, and what a row needs where it is not neutral."""

    EDIT = EDITED
    COUNT = EDITED | COUNTED
    CUT = CUTS
    #: That a token is drawn at all.
    DRAW = DRAWS
    #: How it is drawn.
    LUCK = 0
    REPORT = PROCESSED_TOPS


@dataclass(frozen=True, slots=True)
class Knob:
    """How a field of `SamplingParams` applies. Its default is neutral, and so is 0 from clients.

    Args:
        stage: where.
        low, high: what a client may ask for, both included; without `low` it is checked elsewhere.
        divides: scores are divided by it: values so small or large that float32 can't hold the
            quotient are brought to where it can.
        stored: from the parameter to what the column holds.
    """

    stage: Stage
    low: float | None = None
    high: float = math.inf
    divides: bool = False
    stored: Callable[[Any], float] | None = None


def _normal(divisor: float) -> float:
    return max(divisor, _LEAST_NORMAL)


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _different(tokens: Collection[int]) -> int:
    return len(set(tokens))


def _all_tokens(words: Collection[Collection[int]]) -> int:
    return sum(map(len, words))


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence's next token is chosen. Every default is neutral.

    Applied in this order: watermark, repetition, presence, frequency and relative frequency
    penalty, logit bias, boost of ends, no end before `min_new_tokens`, allowed tokens, bad words,
    temperature, top_k, top_p, min_p, typical_p, softmax, draw. The draw's noise is a function
    of (seed, stream, position, token).
    """

    do_sample: Annotated[bool, Knob(Stage.DRAW)] = False
    temperature: Annotated[float, Knob(Stage.LUCK, 0, 100, divides=True, stored=_normal)] = 1.0
    top_k: Annotated[int, Knob(Stage.CUT)] = 0
    top_p: Annotated[float, Knob(Stage.CUT, 0, 1)] = 1.0
    #: The column holds its logarithm.
    min_p: Annotated[float, Knob(Stage.CUT, 0, 1, stored=_log)] = 0.0
    typical_p: Annotated[float, Knob(Stage.CUT, 0, 1)] = 1.0
    #: CTRL's: divides positive and multiplies negative logits of tokens in prompt or output.
    repetition_penalty: Annotated[float, Knob(Stage.COUNT, 0, 100, divides=True)] = 1.0
    #: Subtracted once from tokens of the output.
    presence_penalty: Annotated[float, Knob(Stage.COUNT, -2, 2)] = 0.0
    #: Subtracted for each occurrence in the output (OpenAI's definition).
    frequency_penalty: Annotated[float, Knob(Stage.COUNT, -2, 2)] = 0.0
    #: TGI's frequency penalty: times count / length over prompt and output, subtracted.
    relative_frequency_penalty: Annotated[float, Knob(Stage.COUNT)] = 0.0
    #: Added to tokens' logits. The column holds how many there are.
    logit_bias: Annotated[dict[int, float], Knob(Stage.EDIT, stored=len)] = {}
    watermark: Annotated[bool, Knob(Stage.EDIT)] = False
    #: Below 2^64; the column holds the int64 of the same bits.
    seed: Annotated[int, Knob(Stage.LUCK, stored=_signed)] = 0
    #: Top tokens are of the distribution that is drawn from, not of the raw logits.
    top_of_processed: Annotated[bool, Knob(Stage.REPORT)] = False
    #: Only these can be drawn; empty: all. The column holds how many there are.
    allowed_token_ids: Annotated[list[int], Knob(Stage.EDIT, stored=_different)] = []
    #: From the output token after so many on, an end's logit grows by |logit| * (factor^n - 1), n
    #: being how many there are beyond, and the power at most MOST_BOOST.
    eos_boost_after: Annotated[int, Knob(Stage.LUCK)] = 0
    eos_boost_factor: Annotated[float, Knob(Stage.EDIT)] = 1.0
    #: Runs of tokens, none empty, that the output never has: the last token of one can't be drawn
    #: where the output ends with the others. The column holds how many tokens they have in all.
    bad_words: Annotated[list[list[int]], Knob(Stage.EDIT, stored=_all_tokens)] = []


class RowValues(NamedTuple):
    """Columns of a row that are no knobs."""

    #: Which of the seed's random streams.
    stream: int = 0
    #: No end is drawn before so many tokens; 0 where the sequence has no ends.
    min_new_tokens: int = 0
    #: How many end-of-text tokens there are, and how many more that end the sequence.
    ends: int = 0
    stops: int = 0
    #: Whether the log probability is wanted.
    logprobs: int = 0
    #: How many most likely tokens to report.
    top_n: int = 0
    #: Whether the token's rank is wanted.
    ranks: int = 0
    #: Tokens of prompt and output so far, and the last of them; the sampler keeps both up to date.
    length: int = 0
    previous: int = 0


@dataclass(frozen=True, slots=True)
class Column:
    """A knob by its name, its type and its neutral value."""

    name: str
    kind: type
    neutral: Any
    knob: Knob


class SamplingTable:
    """The knobs of `params` and the row of 64-bit words that holds them: float64 or int64 each.

    Raises:
        ValueError: they are more than a row's words.
    """

    def __init__(self, params: type[SamplingParams] = SamplingParams) -> None:
        hints = get_type_hints(params, include_extras=True)
        #: In the order of the fields.
        self.columns = tuple(_column(f, hints[f.name]) for f in msgspec.structs.fields(params))
        self._neutral = [(c.neutral, c.knob.stage.value) for c in self.columns]
        stored = [(at, column.knob.stored) for at, column in enumerate(self.columns)]
        self._stored = [(at, of) for at, of in stored if of is not None]
        # Knobs come last, so that one more leaves the others where they are.
        kinds = dict.fromkeys(("flags", *RowValues._fields), "q")
        kinds |= {c.name: "d" if c.kind is float else "q" for c in self.columns}
        if len(kinds) > ROW_WORDS:
            raise ValueError(f"{len(kinds)} columns; a sampler's row has {ROW_WORDS} words")
        self._places = {name: at for at, name in enumerate(kinds)}
        padding = 8 * (ROW_WORDS - len(kinds))
        self._packed = Struct(f"={''.join(kinds.values())}{padding}x")
        #: A row: the host's sampler reads it by names, a device's by the places of int64 words.
        self.dtype = np.dtype(
            {
                "names": [*kinds],
                "formats": [*kinds.values()],
                "offsets": [8 * at for at in range(len(kinds))],
                "itemsize": 8 * ROW_WORDS,
            }
        )

    def place(self, name: str) -> int:
        """Which word of a row holds this column."""
        return self._places[name]

    def needs(self, params: SamplingParams) -> int:
        """Flags of the knobs that are not neutral."""
        needs = 0
        for value, (neutral, flags) in zip(
            msgspec.structs.astuple(params), self._neutral, strict=True
        ):
            if value != neutral:
                needs |= flags
        return needs

    def row(self, params: SamplingParams, values: RowValues) -> Words:
        """[ROW_WORDS] int64: a sequence's row."""
        assert not params.do_sample or params.temperature > 0, "temperature 0 is not sampling"
        assert params.min_p <= 1, f"min_p {params.min_p} would leave no token"
        flags = self.needs(params) | (EDITED if values.min_new_tokens else 0)
        if values.logprobs or values.top_n or values.ranks:
            flags |= REPORTED
        if not params.do_sample:
            flags &= ~CUTS
        if not (params.top_of_processed and values.top_n):
            flags &= ~PROCESSED_TOPS
        words = [*msgspec.structs.astuple(params)]
        for i, stored in self._stored:
            words[i] = stored(words[i])
        return np.frombuffer(self._packed.pack(flags, *values, *words), np.int64)


def _column(field: msgspec.structs.FieldInfo, hint: Any) -> Column:
    kind, knob = get_args(hint)
    neutral = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return Column(field.name, get_origin(kind) or kind, neutral, knob)


#: The knobs that clients may set.
TABLE = SamplingTable()
