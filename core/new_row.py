"""What a plan says of a sequence that takes a row, besides its columns."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.requests import Request
from tokenpod.core.sampling import (
    DRAWS,
    EDITED,
    MOST_TOP_TOKENS,
    TABLE,
    RowValues,
    SamplingTable,
    Words,
)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that takes a row: what its sampler needs. Followers don't sample."""

    request: Request
    #: Which of the seed's random streams.
    stream: int
    #: What it has sampled already, if it was preempted and is computed again.
    outputs: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        """End-of-text tokens, rising, where they may not be drawn at first or are boosted later."""
        stopping, boost = self.request.stopping, self.request.sampling.eos_boost_factor
        return sorted(stopping.eos_token_ids) if stopping.min_new_tokens or boost != 1 else []

    @property
    def stops(self) -> list[int]:
        """The other tokens that may not be drawn before `min_new_tokens`, rising."""
        stopping = self.request.stopping
        if not stopping.min_new_tokens:
            return []
        return sorted(stopping.stop_token_ids - stopping.eos_token_ids)

    @property
    def flags(self) -> int:
        """What it asks of a sampler, of `DRAWS` and `EDITED`: nothing if it is read for vectors."""
        if self.request.pooling is not None:
            return 0
        flags = TABLE.needs(self.request.sampling) & (DRAWS | EDITED)
        return flags | EDITED if self.ends or self.stops else flags

    def words(self, table: SamplingTable) -> Words:
        """[ROW_WORDS] int64: its row of a sampler."""
        request, ends, stops = self.request, self.ends, self.stops
        tokens = self.outputs or request.prompt
        values = RowValues(
            stream=self.stream,
            min_new_tokens=request.stopping.min_new_tokens if ends or stops else 0,
            ends=len(ends),
            stops=len(stops),
            logprobs=request.logprobs,
            top_n=min(request.top_n_tokens, MOST_TOP_TOKENS),
            ranks=request.ranks,
            length=len(request.prompt) + len(self.outputs),
            previous=tokens[-1] if tokens else 0,
        )
        return table.row(request.sampling, values)
