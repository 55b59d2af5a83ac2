"""Pinned memory through which a step's integers go to a GPU and its results come back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.core.own_process import end_naps_on_time
from tokenpod.core.plan import StepPlan
from tokenpod.core.sampling import MOST_TOP_TOKENS
from tokenpod.engine.sampling.prompt_scores import PromptScores
from tokenpod.engine.sampling.sampler import Samples
from tokenpod.engine.steps.executor import Masks, PooledRows, StepResult
from tokenpod.engine.steps.integers import StepWords
from tokenpod.engine.steps.offload_copies import OffloadCopies
from tokenpod.engine.steps.rounds import Drawing, masks_there, row_after_row

#: How often results that are urgent are looked for.
LOOK_SECONDS = 20e-6
_ALIGNMENT = 64
_TORCH_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class Posted:
    """Results on their way to the host."""

    samples: int
    #: Whether there are top tokens.
    tops: bool
    #: Whether there are tokens' ranks.
    ranks: bool
    scored: dict[int, PromptScores]
    pooled: list[PooledRows]


def upload(values: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values on a device, in the order of the current stream and without waiting for it."""
    source = torch.as_tensor(values)
    if device.type == "cuda":
        # Pinned memory is not used again before the copy is done.
        source = source.pin_memory()
    return source.to(device, non_blocking=True)


class Staging:
    """Pinned memory through which a step's other values go to a device, one behind the other.

    Memory that is pinned for each of them may be asked of the system, which takes milliseconds
    while the device computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = self._pinned(1 << 16)
        self._taken = 0

    def begin(self) -> None:
        """All of it is free: what was sent has arrived."""
        self._taken = 0

    def room(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], torch.Tensor]:
        """Memory for values of int32 or int64, to be written before it is sent: two views of it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._taken + size > len(self._memory):
            # Copies under way keep what they read.
            self._memory, self._taken = self._pinned(2 * (self._taken + size)), 0
        part = self._memory[self._taken : self._taken + size]
        self._taken += -(-size // _ALIGNMENT) * _ALIGNMENT
        own = part.view(_TORCH_TYPES[np.dtype(dtype)]).view(shape)
        return own.numpy(), own

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Values of `room`, now written, on the device, in the order of its queue."""
        return values.to(self._device, non_blocking=True)

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Other values, likewise.

        Each row of several begins at a multiple of 64 bytes: Triton compiles a kernel once more for
        a pointer that is aligned otherwise, which takes seconds.
        """
        *rows, n = values.shape
        unit = _ALIGNMENT // values.itemsize
        host, own = self.room((*rows, -(-n // unit) * unit), values.dtype)
        host[..., :n] = values
        return self.send(own)[..., :n]

    def _pinned(self, size: int) -> torch.Tensor:
        on_gpu = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)


class Mailbox:
    """Memory of one step at a time; free again when that step has been waited for.

    Args:
        samples: most of a step.
        words: most int64 words of integers of a step.
        device: a GPU, or a CPU, for which nothing is pinned and nothing asynchronous.
        drafts: most of a step that the device finds, and words of the integers for that.

    The thread that makes it is the one that waits.
    """

    _drafting: tuple[Mark, Mark] | None

    def __init__(
        self, samples: int, words: int, device: torch.device, drafts: tuple[int, int] = (0, 0)
    ) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            end_naps_on_time()
        #: For what else the step sends to the device.
        self.staging = Staging(device)
        #: The step's integers: the same memory as torch and as numpy see it.
        self.words = self._pinned(words, dtype=torch.int64)
        self.integers = StepWords(self.words.numpy())
        #: The same of what the device finds drafts with.
        self.draft_words = self._pinned(drafts[1], dtype=torch.int64)
        self._drafts = self._pinned(drafts[0], dtype=torch.int64)
        self._tokens = self._pinned(samples, dtype=torch.int64)
        self._logprobs = self._pinned(samples, dtype=torch.float32)
        self._ranks = self._pinned(samples, dtype=torch.int64)
        self._top_ids = self._pinned(samples, MOST_TOP_TOKENS, dtype=torch.int64)
        self._top_logprobs = self._pinned(samples, MOST_TOP_TOKENS, dtype=torch.float32)
        self._make_marks()

    def begin(self) -> None:
        """Mark the begin of the step, before its work is queued."""
        self._drafting, self._found = None, 0
        self._began.record()

    def drafted(self, between: tuple[Mark, Mark] | None = None) -> None:
        """Mark that the step's drafts have been found: since it began, or before that."""
        self._drafting = between or (self._began, self._drafted)
        if between is None:
            self._drafted.record()

    def post_drafts(self, tokens: torch.Tensor) -> None:
        """Queue the copy of drafts [n] int64 that the device has found to the host."""
        self._found = len(tokens)
        self._drafts[: self._found].copy_(tokens, non_blocking=True)

    def forwarded(self) -> None:
        """Mark the end of the forward pass, before sampling is queued."""
        self._forwarded.record()

    def send(
        self,
        drawn: Samples | None,
        scored: dict[int, PromptScores],
        pooled: Sequence[PooledRows] = (),
    ) -> Posted:
        """Queue the copies of results to the host.

        Args:
            drawn: samples, if any row sampled.
            scored: by row of the plan: scores of its prompt tokens.
            pooled: vectors of texts, and of tokens.
        """
        samples, tops, ranks = 0, 0, drawn is not None and drawn.ranks is not None
        if drawn is not None:
            samples, tops = drawn.top_ids.shape
            if drawn.ranks is not None:
                self._ranks[:samples].copy_(drawn.ranks, non_blocking=True)
            self._tokens[:samples].copy_(drawn.tokens, non_blocking=True)
            self._logprobs[:samples].copy_(drawn.logprobs, non_blocking=True)
            if tops:
                self._top_ids[:samples].copy_(drawn.top_ids, non_blocking=True)
                self._top_logprobs[:samples].copy_(drawn.top_logprobs, non_blocking=True)
        hosted = {at: scores.map(self._hosted) for at, scores in scored.items()}
        vectors = [replace(rows, numbers=self._hosted(rows.numbers)) for rows in pooled]
        self._done.record()
        return Posted(samples, tops > 0, ranks, hosted, vectors)

    def receive(self, posted: Posted, *, urgent: bool = False) -> StepResult:
        """Wait for the copies; samples as they were drawn, round after round.

        `urgent`: the device has nothing else to do until the host has seen them.
        """
        self._done.wait(urgent=urgent)
        drawn = self._samples(posted.samples)
        ranks = drawn.ranks if posted.ranks else None
        forward_ns, drafting_ns = self._began.nanoseconds_to(self._forwarded), 0
        if self._drafting is not None:
            began, ended = self._drafting
            drafting_ns = began.nanoseconds_to(ended)
            forward_ns += 0 if began is self._began else drafting_ns
        return StepResult(
            tokens=drawn.tokens.tolist(),
            logprobs=drawn.logprobs.tolist(),
            tops=drawn.tops if posted.tops else [],
            ranks=ranks.tolist() if ranks is not None else [],
            scored=posted.scored,
            pooled=posted.pooled,
            forward_ns=forward_ns,
            drafting_ns=drafting_ns,
            drafts=self._drafts[: self._found].tolist() if self._found else [],
            sample_ns=self._forwarded.nanoseconds_to(self._done),
        )

    def _make_marks(self) -> None:
        self._began, self._drafted, self._forwarded, self._done = (
            Mark(self._on_gpu) for _ in range(4)
        )
        #: Between which marks the step's drafts have been found, if any were; and how many.
        self._drafting, self._found = None, 0

    def _samples(self, n: int) -> Samples:
        tops = self._top_ids[:n], self._top_logprobs[:n]
        return Samples(self._tokens[:n], self._logprobs[:n], *tops, self._ranks[:n])

    def _hosted(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, once the device is there."""
        own = self._pinned(*values.shape, dtype=values.dtype)
        return own.copy_(values, non_blocking=True)

    def _pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._on_gpu)


class CpuMailbox(Mailbox):
    """Of one step on a CPU, where results stay where they were drawn, and integers are not sent."""

    def __init__(self) -> None:
        self._on_gpu = False
        self._make_marks()
        self._drawn: Samples | None = None

    def post_drafts(self, tokens: torch.Tensor) -> None:
        """Keep the drafts."""
        self._drafts, self._found = tokens, len(tokens)

    def send(
        self,
        drawn: Samples | None,
        scored: dict[int, PromptScores],
        pooled: Sequence[PooledRows] = (),
    ) -> Posted:
        """Keep the results."""
        self._drawn = drawn
        self._done.record()
        samples, tops = (0, 0) if drawn is None else drawn.top_ids.shape
        ranks = drawn is not None and drawn.ranks is not None
        return Posted(samples, tops > 0, ranks, scored, [*pooled])

    def _samples(self, n: int) -> Samples:
        return Samples.nothing(0, 0) if self._drawn is None else self._drawn


@dataclass(slots=True)
class Flight:
    """A step under way: forwarded or about to be, and sampled but for rows that wait for masks."""

    _mailbox: Mailbox
    plan: StepPlan
    _scored: dict[int, PromptScores] = field(default_factory=dict)
    _pooled: Sequence[PooledRows] = ()
    #: What draws for rows that wait for masks.
    later: Drawing | None = None
    _posted: Posted | None = None
    #: Of its executor.
    copies: OffloadCopies | None = None
    #: How many masks came, by rows of the plan that have too few.
    _there: dict[int, int] = field(default_factory=dict)

    def send(self, drawn: Samples | None) -> None:
        """Queue the copies of results: all samples, if any row sampled, round after round."""
        self._posted = self._mailbox.send(drawn, self._scored, self._pooled)

    def sample(self, masks: Masks | None) -> None:
        """See `Launched.sample`; None: the leader has them."""
        if self.later is None:
            return
        later, self.later = self.later, None
        with torch.inference_mode():
            later.draw_masked(masks or {})
            self.send(later.drawn)
        self._there = masks_there(self.plan, masks)

    def wait(self) -> StepResult:
        """The result, once the device has it; once, and before the mailbox's next step."""
        self.sample({})
        assert self._posted is not None
        # What follows a row with drafts is launched when these are known, and what masks follow
        # are made then.
        urgent = self.plan.drafts > 0 or self.plan.waits_for_masks
        result = self._mailbox.receive(self._posted, urgent=urgent)
        if self._there or self.plan.drafts:
            result = row_after_row(self.plan, result, self._there)
        arrived = self.copies.arrived() if self.copies else None
        return result if arrived is None else replace(result, arrived=arrived)


class Mark:
    """A point in the device's queue, or in time where there is no queue."""

    def __init__(self, on_gpu: bool) -> None:
        # Blocking: the waiting thread sleeps, so that the core is free for others.
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._at = 0

    def record(self) -> None:
        """It is now, or where the device's queue ends now."""
        if self._event is not None:
            self._event.record()
        self._at = time.monotonic_ns()

    def wait(self, *, urgent: bool) -> None:
        """Until it has been passed; see `Mailbox.receive`."""
        if self._event is None:
            return
        # A thread that sleeps is woken late; to look now and then costs some of a core.
        while urgent and not self._event.query():  # type: ignore[no-untyped-call]
            time.sleep(LOOK_SECONDS)
        self._event.synchronize()

    @property
    def passed(self) -> bool:
        """Whether the device has passed it."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def nanoseconds_to(self, later: Mark) -> int:
        """Both must have been passed."""
        if self._event is not None and later._event is not None:
            return int(self._event.elapsed_time(later._event) * 1e6)
        return later._at - self._at
