"""Requests whose constraints are being compiled, by threads beside the step loop.

    begin --quick: a trial of 0.1 s, then the engine's own--> a text for each sequence, or a problem
                |
                +-- took longer --dear: a trial of half the time limit, at a low priority--> ...

A trial is in a process of its own (trial.py). Those that take long wait for each other and for
nobody else, nobody else waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tokenpod.core.constraints import Constraint, ConstraintLimits
from tokenpod.core.messages import Vocabulary
from tokenpod.core.outputs import Failure, FailureCode
from tokenpod.core.requests import Request
from tokenpod.engine.constraints.cache import MOST_SHARING, CompileCache, Compiled
from tokenpod.engine.constraints.library import Library, LimitReached, Lost, Refused
from tokenpod.engine.constraints.text import ConstrainedText
from tokenpod.engine.constraints.trial import TooLong
from tokenpod.engine.constraints.trials import START_SECONDS, Trials
from tokenpod.engine.constraints.workers import Workers

log = logging.getLogger("tokenpod.engine")

_NEVER = "this model's vocabulary can't be used for constraints"
_LOST = "the process that compiles constraints was lost, and so was its successor"
#: Seconds of a trial that most constraints need a hundredth of.
_QUICK_SECONDS = 0.1

LibraryOf = Callable[[list[bytes], list[int]], Library]


@dataclass(slots=True)
class Compiling:
    """A request whose constraint is being compiled."""

    request: Request
    asked_at: int
    texts: list[ConstrainedText] | None = None
    #: Why there are none.
    code: FailureCode = FailureCode.INVALID_ARGUMENT
    problem: str = ""
    done: bool = False
    #: Sequences that are over already.
    gone: set[int] = field(default_factory=set)


class Compiler:
    """Compiles constraints of requests.

    Args:
        library: makes the library of a vocabulary; it is called by a worker.
        vocab_size: width of the model's logits.
        limits: what constraints may cost.
        clock: nanoseconds.
        trials: whether constraints are tried first, in other processes.
    """

    def __init__(
        self,
        library: LibraryOf,
        vocab_size: int,
        limits: ConstraintLimits,
        clock: Callable[[], int],
        *,
        trials: bool,
    ) -> None:
        #: Of the vocabulary; None: it is not known yet, or can't be used.
        self.library: Library | None = None
        self.cache = CompileCache(limits.cache_bytes)
        #: Requests that were refused.
        self.refused = 0
        self._make_library = library
        self._vocab_size = vocab_size
        self._limits = limits
        self._clock = clock
        self._tries = trials
        self._trials: Trials | None = None
        self._known = threading.Event()
        #: When the first constraint could be compiled: vocabulary and trials were there.
        self._ready_at: int | None = None
        self._jobs: deque[Compiling] = deque()

    def learn(self, vocabulary: Vocabulary, workers: Workers) -> None:
        """Read a vocabulary, in a worker. Constraints wait until that is done."""
        tokens = vocabulary.tokens[: self._vocab_size]
        tokens = tokens + [b""] * (self._vocab_size - len(tokens))
        if self._tries:
            self._trials = Trials(tokens, vocabulary.special, workers.compilers)
        workers.run(partial(self._learn, tokens, vocabulary.special), "compile")

    def begin(self, request: Request, workers: Workers) -> None:
        """Compile a request's constraint; see `settled`."""
        job = Compiling(request, self._clock())
        self._jobs.append(job)
        workers.run(partial(self._compile, job, workers), "compile")

    def settled(self) -> tuple[dict[int, ConstrainedText], list[Failure]]:
        """Texts of sequences whose constraints are compiled, and failures of the others."""
        texts: dict[int, ConstrainedText] = {}
        failures: list[Failure] = []
        left: deque[Compiling] = deque()
        for job in self._jobs:
            if job.done and not job.problem:
                assert job.texts is not None
                each = zip(job.request.sequence_ids, job.texts, strict=True)
                texts |= {of: text for of, text in each if of not in job.gone}
            elif job.done or self._late(job):
                problem = job.problem or self._too_long
                failures += [Failure(of, job.code, problem) for of in job.request.sequence_ids]
                self.refused += 1
            else:
                left.append(job)
        self._jobs = left
        return texts, failures

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences are over."""
        for job in self._jobs:
            job.gone.update(sequence_ids)

    def over(self, text: ConstrainedText, workers: Workers) -> None:
        """A text is over, and nobody works at it: its matcher may follow another one."""
        workers.run(partial(self._give_back, text), "compile")

    @property
    def busy(self) -> bool:
        """Whether there are requests that wait."""
        return bool(self._jobs)

    @property
    def _too_long(self) -> str:
        return f"constraint: takes more than {self._limits.compile_seconds:g} s to compile"

    def _late(self, job: Compiling) -> bool:
        ready_at = self._ready_at
        if ready_at is None:
            ready_at = job.asked_at + int(START_SECONDS * 1e9)
        since = max(job.asked_at, ready_at)
        return self._clock() - since > self._limits.compile_seconds * 1e9

    # -- in workers ----------------------------------------------------------------------------

    def _learn(self, tokens: list[bytes], special: list[int]) -> None:
        try:
            self.library = self._make_library(tokens, special)
        except BaseException as error:
            log.error("constraints are off", extra={"reason": str(error)[:200]})
        self._known.set()

    def _compile(self, job: Compiling, workers: Workers) -> None:
        self._known.wait()
        try:
            if self._ready_at is None:
                if self._trials is not None:
                    with contextlib.suppress(Lost, TooLong):  # the trial tells it
                        self._trials.start()
                self._ready_at = self._clock()
            self._do(job, _QUICK_SECONDS)
        except TooLong:
            workers.run(partial(self._compile_dear, job), "dear")

    def _give_back(self, text: ConstrainedText) -> None:
        if text.constraint is not None and text.matcher.begin_again():
            self.cache.give_back(text.constraint, text.matcher)

    def _compile_dear(self, job: Compiling) -> None:
        if self._late(job):
            return
        try:
            # The engine's own compiling takes as long again.
            self._do(job, self._limits.compile_seconds / 2, dear=True)
        except TooLong:
            job.problem = self._too_long
            job.done = True

    def _do(self, job: Compiling, seconds: float, *, dear: bool = False) -> None:
        """Compile a request's constraint. Raises TooLong."""
        try:
            job.texts = self._texts(job.request, seconds, dear=dear)
            if job.texts[0].over:
                raise Refused("no token can begin a text that conforms to it")
        except TooLong:
            raise
        except (Refused, LimitReached) as error:
            job.problem = f"constraint: can't be used: {error}"
        except Lost as error:
            log.warning("what compiles constraints was lost twice", exc_info=error)
            job.code, job.problem = FailureCode.COMPILER_LOST, _LOST
        except Exception as error:
            job.code, job.problem = FailureCode.INTERNAL, log_fault(error)
        except BaseException as error:  # what the library raises when it panics is no Exception
            log.error("a constraint was not compiled", extra={"reason": type(error).__name__})
            job.problem = "constraint: can't be used: the library failed to compile it"
        job.done = True

    def _texts(self, request: Request, seconds: float, *, dear: bool) -> list[ConstrainedText]:
        if self.library is None:
            raise Refused(_NEVER)
        constraint, n = request.constraint, len(request.sequence_ids)
        assert constraint is not None

        def make(before: Compiled | None) -> Compiled:
            prepared = before.prepared if before else ""
            if self._trials is not None and not before:
                prepared = self._trials.try_first(constraint, seconds, dear=dear)
            return self._compiled(constraint, prepared)

        texts: list[ConstrainedText] = []
        while len(texts) < n:
            if (used := self.cache.used(constraint)) is not None:
                texts.append(ConstrainedText(request, *used))
                continue
            some = min(n - len(texts), MOST_SHARING)
            compiled = self.cache.get(constraint, make, some)
            texts += [ConstrainedText(request, compiled) for _ in range(some)]
        return texts

    def _compiled(self, constraint: Constraint, prepared: str) -> Compiled:
        assert self.library is not None
        more = (prepared,) if prepared else ()
        matcher = self.library.compile(constraint, *more)
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        return Compiled(matcher, words, matcher.fill(words), prepared)


def log_fault(error: Exception) -> str:
    """Log an exception that nobody foresaw; returns the id by which its client can name it."""
    error_id = secrets.token_hex(6)
    # In the text: this process's log has no formatter that would show more.
    log.error("internal error %s", error_id, exc_info=error)
    return error_id
