"""Masks of all constrained sequences, for the step loop, which never waits long for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from tokenpod.core.constraints import Constraint, ConstraintLimits
from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import FinishCode, MaskCounts
from tokenpod.core.requests import Request
from tokenpod.engine.constraints.cache import CompileCache, Compiled
from tokenpod.engine.constraints.compiling import Compiling
from tokenpod.engine.constraints.library import SLOW_NS, Library, LimitReached, Refused, Words
from tokenpod.engine.constraints.text import ConstrainedText
from tokenpod.engine.constraints.together import read_together
from tokenpod.engine.constraints.workers import Workers

log = logging.getLogger("tokenpod.engine")

_DONE = object()
_NEVER = "this model's vocabulary can't be used for constraints"


class Masks:
    """Compiles constraints, follows the tokens of their sequences, and makes the masks.

    Args:
        library: makes the library of a vocabulary; it is called by a worker.
        vocab_size: width of the model's logits.
        limits: what constraints may cost.
        clock: nanoseconds.
    """

    def __init__(
        self,
        library: Callable[[list[bytes], list[int]], Library],
        vocab_size: int,
        limits: ConstraintLimits,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._make_library = library
        self._vocab_size = vocab_size
        self._limits = limits
        self._clock = clock
        self._library: Library | None = None
        self._known = threading.Event()
        self._workers: Workers | None = None
        self._cache = CompileCache(limits.cache_bytes)
        self._texts: dict[int, ConstrainedText] = {}
        self._compiling: deque[Compiling] = deque()
        #: Guards texts' jobs, and `_awaited`: the texts that the loop waits for, and until when.
        self._lock = threading.Lock()
        self._awaited: dict[ConstrainedText, Callable[[], bool]] = {}
        self._all_there = threading.Event()
        self._needed = self._late = self._nanoseconds = self._refused = 0

    # -- requests ------------------------------------------------------------------------------

    def learn(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary, in a worker. Constraints wait until that is done."""
        tokens = vocabulary.tokens[: self._vocab_size]
        tokens = tokens + [b""] * (self._vocab_size - len(tokens))
        self._workers = self._workers or Workers(self._limits.workers)
        self._workers.run(partial(self._learn, tokens, vocabulary.special), "compile")

    def begin(self, request: Request) -> None:
        """Compile a request's constraint; see `refusals` and `ready`."""
        self._workers = self._workers or Workers(self._limits.workers)
        job = Compiling(request, self._clock())
        self._compiling.append(job)
        self._workers.run(partial(self._compile, job), "compile")

    def refusals(self) -> list[tuple[Request, str]]:
        """Requests whose constraints can't be compiled, or not in time, and why."""
        if not self._compiling:
            return []
        found: list[tuple[Request, str]] = []
        left: deque[Compiling] = deque()
        most = self._limits.compile_seconds
        for job in self._compiling:
            late = self._clock() - job.asked_at > most * 1e9
            if job.done and not job.problem:
                assert job.texts is not None
                for sequence_id, text in zip(job.request.sequence_ids, job.texts, strict=True):
                    if sequence_id not in job.gone:
                        self._texts[sequence_id] = text
            elif job.done or late:
                problem = job.problem or f"constraint: takes more than {most:g} s to compile"
                found.append((job.request, problem))
                self._refused += 1
            else:
                left.append(job)
        self._compiling = left
        return found

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences are over."""
        if self._texts or self._compiling:
            for sequence_id in sequence_ids:
                self._texts.pop(sequence_id, None)
                for job in self._compiling:
                    job.gone.add(sequence_id)

    # -- tokens --------------------------------------------------------------------------------

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._texts

    def took(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Sequences have got tokens, each of them allowed, and go on: make their next masks."""
        assert self._library is not None or not taken
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
            assert self._workers is not None
            self._read_together(together, self._workers)

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

    def over(self, sequence_ids: Iterable[int]) -> list[int]:
        """Those of these sequences that can't go on: nothing is allowed, or a limit was reached."""
        most, now = self._limits.mask_seconds * 1e9, self._clock()
        found = []
        for sequence_id in sequence_ids:
            text = self._texts.get(sequence_id)
            if text is None:
                continue
            began = text.began_at
            late = began is not None and now - began > most
            if text.over or (late and not text.ready):
                found.append(sequence_id)
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
        cache = self._cache
        return MaskCounts(
            self._needed, self._late, self._nanoseconds, cache.hits, cache.misses, self._refused
        )

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
        assert self._workers is not None
        with self._lock:
            text.jobs.append(job)
            if text.busy:
                return
            text.busy = True
        self._workers.run(partial(self._work, text), "slow" if text.slow else "fast")

    def _joins(self, text: ConstrainedText) -> bool:
        """Whether a text's next mask is made together with others'."""
        apart = text.busy or text.slow or text.suspect
        return not apart and self._library is not None and self._library.joins(text.matcher)

    def _read_together(self, texts: list[tuple[ConstrainedText, int]], workers: Workers) -> None:
        """Read a token of each text and make the next masks, in the loop's thread.

        Nothing is quicker: between threads the interpreter's lock changes hands several times a
        mask, while the loop plans. No clock ends a text here: the library's limits do.
        """
        assert self._library is not None
        began = self._clock()
        try:
            for text in read_together(self._library, texts, workers.together):
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

    def _learn(self, tokens: list[bytes], special: list[int]) -> None:
        try:
            self._library = self._make_library(tokens, special)
        except BaseException as error:
            log.error("constraints are off", extra={"reason": str(error)[:200]})
        self._known.set()

    def _compile(self, job: Compiling) -> None:
        constraint = job.request.constraint
        assert constraint is not None
        try:
            self._known.wait()
            if self._library is None:
                raise Refused(_NEVER)
            compiled = self._cache.get(constraint, partial(self._compiled, constraint))
            job.texts = [ConstrainedText(job.request, compiled) for _ in job.request.sequence_ids]
            if job.texts[0].over:
                raise Refused("no token can begin a text that conforms to it")
        except (Refused, LimitReached) as error:
            job.problem = f"constraint: {error}"
        except BaseException as error:
            log.error("a constraint was not compiled", extra={"reason": type(error).__name__})
            job.problem = "constraint: the library failed to compile it"
        job.done = True

    def _compiled(self, constraint: Constraint) -> Compiled:
        assert self._library is not None
        matcher = self._library.compile(constraint)
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        return Compiled(matcher, words, matcher.fill(words))

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
            except BaseException as error:
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
