"""What a row asks of its sampler: the description that both samplers work from."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One sequence's parameters, and what follows from them."""

    params: SamplingParams
    #: Which of the seed's random streams.
    stream: int
    #: No end is drawn before so many tokens; 0 where the sequence has no ends.
    min_new_tokens: int
    #: Tokens that may not be drawn before `min_new_tokens`, rising.
    ends: tuple[int, ...]
    #: Somebody reads the log probability.
    logprobs: bool
    #: How many most likely tokens to report.
    top_n: int

    @classmethod
    def describe(
        cls,
        params: SamplingParams,
        *,
        stream: int,
        eos_token_ids: frozenset[int],
        stop_token_ids: frozenset[int],
        min_new_tokens: int,
        logprobs: bool,
        top_n: int,
    ) -> RowSampling:
        """From what a plan says of a new row."""
        assert not params.do_sample or params.temperature > 0, "temperature 0 is not sampling"
        assert params.min_p <= 1, f"min_p {params.min_p} would leave no token"
        ends = tuple(sorted(eos_token_ids | stop_token_ids))
        return cls(params, stream, min_new_tokens if ends else 0, ends, logprobs, top_n)

    @property
    def plain(self) -> bool:
        """Greedy, with untouched scores."""
        return not (self.params.do_sample or self.edited)

    @property
    def edited(self) -> bool:
        """Something comes before temperature."""
        return self.penalised or self.min_new_tokens > 0

    @property
    def penalised(self) -> bool:
        """Watermark, penalties or bias change the scores."""
        params = self.params
        return bool(params.watermark or params.logit_bias or self.counted)

    @property
    def counted(self) -> bool:
        """A penalty asks how often tokens occurred."""
        params = self.params
        return bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.relative_frequency_penalty
        )

    @property
    def tops_processed(self) -> bool:
        """Top tokens are reported, and are of the processed scores."""
        return self.params.top_of_processed and self.top_n > 0

    @property
    def truncates(self) -> bool:
        """The distribution is cut before the draw."""
        params = self.params
        return bool(params.top_k or params.top_p < 1.0 or params.min_p or params.typical_p < 1.0)
