"""Masks of all constrained sequences, for the step loop, which never waits long for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from tokenpod.core.constraints import ConstraintLimits
from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import Failure, FailureCode, FinishCode, MaskCounts
from tokenpod.core.requests import Request
from tokenpod.engine.constraints.compiling import Compiler, LibraryOf, log_fault
from tokenpod.engine.constraints.library import SLOW_NS, LimitReached, Words
from tokenpod.engine.constraints.text import ConstrainedText
from tokenpod.engine.constraints.together import read_together
from tokenpod.engine.constraints.workers import Workers

log = logging.getLogger("tokenpod.engine")

_DONE = object()


class Masks:
    """Compiles constraints, follows the tokens of their sequences, and makes the masks.

    Args:
        library: makes the library of a vocabulary; it is called by a worker.
        vocab_size: width of the model's logits.
        limits: what constraints may cost.
        clock: nanoseconds.
        trials: whether constraints are compiled in other processes first (trial.py).
    """

    def __init__(
        self,
        library: LibraryOf,
        vocab_size: int,
        limits: ConstraintLimits,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        trials: bool = False,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._compiler = Compiler(library, vocab_size, limits, clock, trials=trials)
        self._started: Workers | None = None
        self._texts: dict[int, ConstrainedText] = {}
        #: Guards texts' jobs, and `_awaited`: the texts that the loop waits for, and until when.
        self._lock = threading.Lock()
        self._awaited: dict[ConstrainedText, Callable[[], bool]] = {}
        self._all_there = threading.Event()
        self._needed = self._late = self._nanoseconds = 0

    # -- requests ------------------------------------------------------------------------------

    def learn(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary, in a worker. Constraints wait until that is done."""
        self._compiler.learn(vocabulary, self._workers)

    def begin(self, request: Request) -> None:
        """Compile a request's constraint; see `failures` and `is_ready`."""
        self._compiler.begin(request, self._workers)

    def failures(self) -> list[Failure]:
        """Of sequences whose constraints can't be compiled, or not in time."""
        if not self._compiler.busy:
            return []
        texts, failures = self._compiler.settled()
        self._texts |= texts
        return failures

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences are over."""
        if self._texts or self._compiler.busy:
            gone = [*sequence_ids]
            for sequence_id in gone:
                if (text := self._texts.pop(sequence_id, None)) is not None:
                    self._over(text)
            self._compiler.forget(gone)

    # -- tokens --------------------------------------------------------------------------------

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._texts

    def took(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Sequences have got tokens, each of them allowed, and go on: make their next masks."""
        together = []
        for sequence_id, tokens in taken.items():
            text = self._texts[sequence_id]
            assert text.ready, f"sequence {sequence_id} was sampled without a mask"
            self._needed += len(tokens)
            unread = text.took(tokens)
            if len(unread) == 1 and self._joins(text):
                together.append((text, unread[0]))
            elif unread:
                self._do(text, text.read(unread))
        if len(together) == 1:
            [(text, token)] = together
            self._do(text, text.read([token]))
        elif together:
            self._read_together(together)

    def look_along(self, sequence_id: int, output: int, drafts: Sequence[int]) -> None:
        """Make the masks behind drafts that are to be checked, from output number `output` on."""
        text = self._texts.get(sequence_id)
        if text is not None and not text.knows(drafts):
            self._do(text, text.look_along(output, drafts))

    def forced(self) -> dict[int, tuple[int, list[int]]]:
        """By sequence, as far as there are any: an output's number, and what it and the next are.

        Their masks allow nothing else, and the mask behind them is there.
        """
        return {
            sequence_id: (text.taken, text.forced)
            for sequence_id, text in self._texts.items()
            if len(text.masks) > 1
        }

    def ended(self, sequence_id: int, tokens: Sequence[int], finish: FinishCode) -> bool:
        """A sequence has ended, with these tokens more or without any; whether its text is whole.

        Tokens are those of its last step.
        """
        text = self._texts.pop(sequence_id)
        whole = self._ended(text, tokens, finish)
        self._over(text)
        return whole

    def _ended(self, text: ConstrainedText, tokens: Sequence[int], finish: FinishCode) -> bool:
        self._needed += len(tokens)
        if finish in (FinishCode.EOS, FinishCode.STOP_TOKEN):
            return True
        if not text.ready:
            # A worker has it: it was ended by a limit, or by the clock.
            return False
        # Masks behind forced tokens may be under way.
        told = partial(text.tells_whole, tokens)
        self._wait({text: told}, self._clock() + int(self._limits.mask_seconds * 1e9))
        try:
            return told() and text.whole_with(tokens)
        except LimitReached:
            return False

    def is_ready(self, sequence_id: int) -> bool:
        """Whether the mask of a sequence's next token is there."""
        text = self._texts.get(sequence_id)
        return text is not None and text.ready

    def over(self, sequence_ids: Iterable[int]) -> dict[int, Failure | None]:
        """Those of these sequences that can't go on.

        None: nothing is allowed, or a limit was reached.
        """
        most, now = self._limits.mask_seconds * 1e9, self._clock()
        found: dict[int, Failure | None] = {}
        for sequence_id in sequence_ids:
            text = self._texts.get(sequence_id)
            if text is None:
                continue
            began = text.began_at
            late = began is not None and now - began > most
            if text.over or (late and not text.ready):
                fault = Failure(sequence_id, FailureCode.INTERNAL, text.fault)
                found[sequence_id] = fault if text.fault else None
        return found

    def masks(
        self, wanted: Mapping[int, tuple[int, int, Sequence[int]]], until: int
    ) -> dict[int, Words]:
        """Masks of a step's rows, as far as they are there at a moment; the loop waits that long.

        Args:
            wanted: by row of the plan, a sequence, the number of its output token, and the drafts
                from there on.
            until: nanoseconds.

        Returns by row: [masks, words], one and one more for each draft that the one before allows.
        """
        found: dict[int, Words] = {}
        texts: dict[int, tuple[ConstrainedText, Sequence[int]]] = {}
        for row, (sequence_id, output, drafts) in wanted.items():
            text = self._texts.get(sequence_id)
            # A row whose last token was not sampled is planned one too far.
            if text is None or output != text.taken:
                continue
            if text.masks and not drafts and not text.masks[0].over:
                found[row] = text.masks[0].words[None]
            else:
                texts[row] = text, drafts
        if texts:
            self._wait({text: partial(text.knows, some) for text, some in texts.values()}, until)
        for row, (text, drafts) in texts.items():
            if not text.over and (masks := text.masks_of(drafts)):
                found[row] = np.stack(masks)
        late = len(texts.keys() - found.keys())
        self._late += late
        self._needed += late
        return found

    @property
    def counts(self) -> MaskCounts:
        """What it has cost so far."""
        made = self._compiler
        compiled = made.cache.hits, made.cache.misses, made.refused
        return MaskCounts(self._needed, self._late, self._nanoseconds, *compiled)

    @property
    def _workers(self) -> Workers:
        self._started = self._started or Workers(self._limits.workers)
        return self._started

    def _over(self, text: ConstrainedText) -> None:
        """Nobody reads this text any more."""
        if not (text.busy or text.over or text.slow):
            self._compiler.over(text, self._workers)

    def _wait(self, texts: dict[ConstrainedText, Callable[[], bool]], until: int) -> None:
        """Wait until what is asked of these texts is so; workers look after each mask."""
        with self._lock:
            self._awaited = {text: there for text, there in texts.items() if not there()}
            if not self._awaited:
                return
            self._all_there.clear()
        self._all_there.wait(max(until - self._clock(), 0) / 1e9)
        with self._lock:
            self._awaited = {}

    def _do(self, text: ConstrainedText, job: Iterator[None]) -> None:
        """Let a worker do a job, behind those that this text has already."""
        with self._lock:
            text.jobs.append(job)
            if text.busy:
                return
            text.busy = True
        self._workers.run(partial(self._work, text), "slow" if text.slow else "fast")

    def _joins(self, text: ConstrainedText) -> bool:
        """Whether a text's next mask is made together with others'."""
        library, apart = self._compiler.library, text.busy or text.slow or text.suspect
        return not apart and library is not None and library.joins(text.matcher)

    def _read_together(self, texts: list[tuple[ConstrainedText, int]]) -> None:
        """Read a token of each text and make the next masks, in the loop's thread.

        Nothing is quicker: between threads the interpreter's lock changes hands several times a
        mask, while the loop plans. No clock ends a text here: the library's limits do.
        """
        library = self._compiler.library
        assert library is not None
        began = self._clock()
        try:
            for text in read_together(library, texts, self._workers.together):
                text.suspect = True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what the library raises when it panics is no Exception
            log.error("masks were not made", extra={"reason": type(error).__name__})
            for text, _ in texts:
                text.end()
        with self._lock:
            self._nanoseconds += self._clock() - began

    # -- in workers ----------------------------------------------------------------------------

    def _work(self, text: ConstrainedText) -> None:
        """Do a text's jobs, until it has none."""
        while True:
            with self._lock:
                if not text.jobs:
                    text.busy = False
                    return
                job = text.jobs.popleft()
            try:
                self._run(text, job)
            except Exception as error:
                text.fault = log_fault(error)
                text.end()
            except BaseException as error:  # what the library raises when it panics
                log.error("a mask was not made", extra={"reason": type(error).__name__})
                text.end()
            text.began_at = None
            self._tell(text)

    def _run(self, text: ConstrainedText, job: Iterator[None]) -> None:
        """Do a job, whose steps each make a mask but the first, and time them."""
        more = next(job, _DONE) is not _DONE
        while more:
            began = text.began_at = self._clock()
            more = next(job, _DONE) is not _DONE
            took, text.began_at = self._clock() - began, None
            text.slow, text.suspect = took > SLOW_NS, False
            self._tell(text, took)

    def _tell(self, text: ConstrainedText, took: int = 0) -> None:
        """Count a mask's time; wake the loop if it waits for what this text has now, alone."""
        with self._lock:
            self._nanoseconds += took
            if text in self._awaited and self._awaited[text]():
                del self._awaited[text]
                if not self._awaited:
                    self._all_there.set()
