"""What a row asks of its sampler: the description that both samplers work from."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.core.messages import SamplingParams
from tokenpod.core.plan import NewRow


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
        stream: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        stop_token_ids: frozenset[int] = frozenset(),
        min_new_tokens: int = 0,
        logprobs: bool = False,
        top_n: int = 0,
    ) -> RowSampling:
        """What follows from a request's parameters."""
        assert not params.do_sample or params.temperature > 0, "temperature 0 is not sampling"
        assert params.min_p <= 1, f"min_p {params.min_p} would leave no token"
        ends = tuple(sorted(eos_token_ids | stop_token_ids))
        return cls(params, stream, min_new_tokens if ends else 0, ends, logprobs, top_n)

    @classmethod
    def of(cls, new: NewRow) -> RowSampling:
        """From what a plan says of a new row."""
        request, stopping = new.request, new.request.stopping
        return cls.describe(
            request.sampling,
            stream=new.stream,
            eos_token_ids=stopping.eos_token_ids,
            stop_token_ids=stopping.stop_token_ids,
            min_new_tokens=stopping.min_new_tokens,
            logprobs=request.logprobs,
            top_n=request.top_n_tokens,
        )

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
