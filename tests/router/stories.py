"""Plays stories on a running shard: full caches, bursts, hang-ups, odd requests, probes, restarts.

    report = await play(path, write(seed, stage))
    assert report.faults(reference) == []

Nothing here waits for a time: clients come, leave and are interrupted when others have read so many
tokens, so that a story on a slow machine is the same story. Only an answer that never comes is
noticed by the clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from router.client import ShardClient, ShardError
from router.double import Overloaded, Router
from router.faults import BrokenPromise, RequestLost, RouterPanic, StartupError
from router.outcomes import Ending, Event, Outcome, Report, ended_alone
from router.records import FinishReason
from router.scripts import Act, Script, Stage, Visit
from router.startup import RouterSettings
from router.streams import GenerationError, HungUp, Prompt, Result, RouterStopped, Stream
from router.wire import V3

#: Ends when the pod is gone; says whether another one serves at its socket.
Interruption = Callable[[], Awaitable[bool]]


@dataclass(eq=False)
class _Client:
    """A visit under way."""

    visit: Visit
    stream: Stream
    befell: set[Event]
    tokens: int = 0


@dataclass
class _Clock:
    """Tokens that all clients have read, and who waits for which number of them."""

    now: int = 0
    _waiting: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, moment: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (moment, next(self._order), call))

    async def until(self, moment: int) -> None:
        reached = asyncio.Event()
        self.at(moment, reached.set)
        await reached.wait()

    def tick(self) -> None:
        self.now += 1
        while self._waiting and self._waiting[0][0] <= self.now:
            heapq.heappop(self._waiting)[2]()

    def skip(self) -> None:
        """Nobody will read anything: every moment is now."""
        while self._waiting:
            heapq.heappop(self._waiting)[2]()


async def play(
    path: str,
    script: Script,
    *,
    interruptions: Mapping[Event, Interruption] | None = None,
    patience: float = 60.0,
) -> Report:
    """Play a story on the shard behind the unix socket `path`.

    Args:
        path: the socket, `-0` included.
        script: what is played.
        interruptions: how to drain or kill the pod, for the events of the script.
        patience: seconds after which a request without an answer is lost.
    """
    story = _Story(path, script, interruptions or {})
    await story.open()
    try:
        async with asyncio.timeout(patience):
            await story.play()
    except TimeoutError:
        story.give_up(f"no answer within {patience} s")
    await story.close()
    return story.report


async def lone_texts(path: str, stage: Stage) -> dict[Prompt, str]:
    """Each part's text, one after another, on a shard that does nothing else."""
    settings = RouterSettings(
        max_input_tokens=stage.max_input_tokens,
        max_total_tokens=stage.max_total_tokens,
        max_batch_prefill_tokens=stage.prefill_tokens[0],
    )
    router = await Router.start(path, settings=settings)
    client = ShardClient(path, V3())
    texts: dict[Prompt, str] = {}
    for part in stage.parts:
        ids = await client.token_ids(part.text)
        result = await router.generate(replace(part, ids=ids, input_length=len(ids)))
        texts[part] = result.text
    await client.close()
    await router.stop()
    return texts


class _Story:
    def __init__(
        self, path: str, script: Script, interruptions: Mapping[Event, Interruption]
    ) -> None:
        self.report = Report(script.seed)
        self._path = path
        self._script = script
        self._interruptions = interruptions
        self._clock = _Clock()
        self._open: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        self._ongoing: set[Event] = set()
        self._followers: Iterator[Visit] = iter(())
        #: Cleared while one router is replaced by another.
        self._reachable = asyncio.Event()
        self._reachable.set()
        #: Whether there is no pod any more.
        self._gone = False
        self._lengths: dict[str, tuple[int, ...]] = {}

    async def open(self) -> None:
        """Start the router, and tokenise every text as it would."""
        client = ShardClient(self._path, V3())
        visits = (v for act in self._script.acts for v in (*act.visits, *act.followers))
        for text in {visit.prompt.text for visit in visits}:
            self._lengths[text] = await client.token_ids(text)
        await client.close()
        self._router = await self._start()

    async def play(self) -> None:
        for number, act in enumerate(self._script.acts):
            if self._gone:
                break
            last = number + 1 == len(self._script.acts)
            await self._act(act, 0 if last else act.overlap)
        await self._until_left(0)
        if not self._gone and self._router.died is None:
            await self._router.idle()
            self._check_books()

    def give_up(self, why: str) -> None:
        for client in list(self._open):
            self._close(client, Ending.LOST, error=why)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop(self._router)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    # --- acts ---------------------------------------------------------------------------------

    async def _act(self, act: Act, overlap: int) -> None:
        began = self._clock.now
        others = [self._spawn(self._probe(began + moment)) for moment in act.probes]
        if act.event is not None:
            self._followers = iter(act.followers)
            others.append(self._spawn(self._interrupt(act.event, began + act.event_at)))
        for visit in act.visits:
            if act.spread:
                await self._moment(self._clock.now + act.spread)
            await self._reachable.wait()
            self._enter(visit)
        await self._until_left(overlap)
        # What is to happen after the last token happens now.
        if not self._open:
            self._clock.skip()
        await asyncio.gather(*others)
        if act.event is not None and not self._gone:
            # A router may notice late: what joins a batch of the pod that is gone goes with it.
            await self._until_left(0 if self._ongoing else overlap)
            if self._router.died is not None:
                await self._restart()
            self._ongoing.clear()

    async def _moment(self, moment: int) -> None:
        if self._open:
            await self._clock.until(moment)

    async def _until_left(self, count: int) -> None:
        while len(self._open) > count:
            self._left.clear()
            await self._left.wait()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def _probe(self, moment: int) -> None:
        """A liveness Prefill, as `/health` makes one after a failure."""
        await self._moment(moment)
        await self._reachable.wait()
        if self._gone:
            return
        router = self._router
        try:
            await router.probe()
        except BrokenPromise as error:
            self.report.complaints.append(str(error))
        except ShardError as error:
            # A router that was stopped takes its calls with it.
            if not self._ongoing and router is self._router:
                self.report.complaints.append(f"a liveness Prefill failed: {error}")

    # --- what befalls -------------------------------------------------------------------------

    async def _interrupt(self, event: Event, moment: int) -> None:
        await self._moment(moment)
        if self._gone:
            return
        self._ongoing.add(event)
        for client in self._open:
            client.befell.add(event)
        if event is not Event.RESTART:
            self._gone = not await self._interruptions[event]()
        else:
            await self._restart()
            self._ongoing.remove(event)

    async def _restart(self) -> None:
        """The router is killed; another one numbers from 0 and clears the shard's cache first."""
        self._reachable.clear()
        await self._stop(self._router)
        try:
            self._router = await self._start()
        except (StartupError, RouterPanic, ShardError) as error:
            self.report.complaints.append(f"no router starts: {error}")
            self._gone = True
        self._reachable.set()

    async def _start(self) -> Router:
        script = self._script
        return await Router.start(
            self._path, wire=script.wire, settings=script.settings, seed=script.seed
        )

    async def _stop(self, router: Router) -> None:
        try:
            await router.stop()
        except (RouterPanic, BrokenPromise) as error:
            if Event.KILL in self._ongoing and isinstance(error.__cause__, ShardError):
                self.report.excused_panics.append(str(error))
            else:
                self.report.panics.append(f"{type(error).__name__}: {error}")
        except RequestLost:
            # Its client's outcome says so.
            return

    # --- clients ------------------------------------------------------------------------------

    def _enter(self, visit: Visit) -> None:
        ids = self._lengths[visit.prompt.text]
        try:
            stream = self._router.submit(replace(visit.prompt, ids=ids, input_length=len(ids)))
        except Overloaded as error:
            refused = Outcome(prompt=visit.prompt, ending=Ending.REFUSED, error=str(error))
            self.report.outcomes.append(refused)
            return
        client = _Client(visit, stream, set(self._ongoing))
        self._open.add(client)
        self._spawn(self._read(client))
        if visit.leaves_at is not None:
            self._clock.at(self._clock.now + visit.leaves_at, stream.drop)

    async def _read(self, client: _Client) -> None:
        stream = client.stream
        try:
            async for _ in stream:
                client.tokens += 1
                self._clock.tick()
                if client.tokens == client.visit.leaves_after:
                    stream.drop()
        except HungUp:
            self._close(client, Ending.HUNG_UP)
        except (GenerationError, RouterStopped) as error:
            self._close(client, Ending.FAILED, error=f"{type(error).__name__}: {error}")
        except (RequestLost, RouterPanic, BrokenPromise) as error:
            self._close(client, Ending.LOST, error=str(error))
        else:
            self._finish(client)

    def _finish(self, client: _Client) -> None:
        result = client.stream.outcome
        assert isinstance(result, Result)
        ending = Ending.ENDED_ALONE if ended_alone(result) else Ending.FINISHED
        self._close(client, ending, text=result.text, reason=result.finish_reason)

    def _close(
        self,
        client: _Client,
        ending: Ending,
        *,
        text: str = "",
        reason: FinishReason | None = None,
        error: str = "",
    ) -> None:
        if client not in self._open:
            return
        self._open.remove(client)
        self.report.outcomes.append(
            Outcome(
                prompt=client.visit.prompt,
                ending=ending,
                text=text,
                reason=reason,
                error=error,
                tokens=client.tokens,
                befell=frozenset(client.befell),
            )
        )
        if self._ongoing & {Event.DRAIN, Event.KILL}:
            for visit in itertools.islice(self._followers, 1):
                self._enter(visit)
        self._left.set()
        if not self._open:
            self._clock.skip()

    def _check_books(self) -> None:
        book = self._router.queue.allocator
        if book is not None and book.available != book.size:
            missing = book.size - book.available
            self.report.complaints.append(f"{missing} blocks of the router were never given back")
