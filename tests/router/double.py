"""A stock TGI router without its HTTP side: start-up, queue, batching loop, health."""

from __future__ import annotations

import asyncio
import random

from router.batching import Batching, Call
from router.client import ShardError, Shards
from router.faults import BrokenPromise, RequestLost, RouterPanic
from router.ledger import Ledger
from router.queue import Entry, Queue
from router.records import LIVENESS_ID, Batch, FinishReason, GeneratedText, Request, ShardInfo
from router.startup import Limits, RouterSettings, agree_on_limits, connect
from router.streams import Prompt, Result, RouterStopped, Stream
from router.validation import Tokenizer, Validation, ValidationError
from router.wire import V3, Wire


class Overloaded(Exception):
    """More requests at once than max_concurrent_requests (HTTP 429)."""


class Router:
    """Drives the shards behind one socket. Make it with `start`, end it with `stop`.

    Whatever would kill the real batching task ends this one. A client would hang from then on: here
    every open and every later stream raises the cause. `health` goes on as if nothing had happened.
    """

    def __init__(
        self,
        shards: Shards,
        wire: Wire,
        settings: RouterSettings,
        info: ShardInfo,
        limits: Limits,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.info = info
        self.limits = limits
        self.queue = Queue(wire, info, limits)
        #: What `/health` believes before it asks. Routers before 1.4 trust no shard that has not
        #: generated yet.
        self.healthy = wire.name != "v1"
        #: What killed the batching task.
        self.died: RouterPanic | BrokenPromise | None = None
        self._shards = shards
        self._wire = wire
        self._settings = settings
        self._validation = Validation(settings, limits, random.Random(seed), tokenizer)
        self._open: set[Stream] = set()
        prefill = settings.max_batch_prefill_tokens if wire.name == "v3" else 0
        ledger = Ledger(prefill, limits.max_batch_total_tokens)
        self._batching = Batching(shards, settings, info, limits, self.queue, ledger, self)
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        path: str,
        *,
        wire: Wire | None = None,
        settings: RouterSettings | None = None,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> Router:
        """Go through the start-up with the shard at the unix socket `path`.

        Raises:
            StartupError: the router would exit with a message.
            RouterPanic: the router would exit with a panic.
            ShardError: Info, ClearCache or Warmup failed.
        """
        wire, settings = wire or V3(), settings or RouterSettings()
        shards = await connect(path, wire)
        try:
            info, limits = await agree_on_limits(shards, wire, settings)
        except BaseException:
            await shards.close()
            raise
        return cls(shards, wire, settings, info, limits, seed, tokenizer)

    async def stop(self) -> None:
        """End at once, as a killed router does: what runs in the shards stays there.

        Raises:
            RouterPanic, BrokenPromise: the batching loop had died before.
            RequestLost: the shards forgot a request.
        """
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for stream in self._open:
            if not stream.over:
                stream.fail(RouterStopped("the router was stopped"))
        await self._shards.close()
        if self.died is not None:
            raise self.died
        if self.lost:
            raise self.lost[0]

    def submit(self, prompt: Prompt) -> Stream:
        """Queue a prompt.

        Raises:
            Overloaded: max_concurrent_requests are open.
            ValidationError: the prompt breaks the router's limits.
        """
        # Who hung up has given its permit back, wherever its request is.
        self._open = {stream for stream in self._open if not stream.over}
        if len(self._open) >= self._settings.max_concurrent_requests:
            raise Overloaded(f"{len(self._open)} requests are open")
        stream = Stream()
        self._append(self._validation.entry(prompt, stream))
        self._open.add(stream)
        if self.died is not None:
            stream.fail(self.died)
        return stream

    @property
    def calls(self) -> list[Call]:
        """Every call of the batching loop, in order."""
        return self._batching.calls

    @property
    def lost(self) -> list[RequestLost]:
        """Requests that the shards forgot, and how."""
        return self._batching.lost

    async def idle(self) -> None:
        """Wait until no request waits and no batch runs, be it only to be dropped.

        Raises:
            RouterPanic, BrokenPromise: the batching loop died.
        """
        await self._batching.idle.wait()
        if self.died is not None:
            raise self.died

    async def generate(self, prompt: Prompt) -> Result:
        """Submit a prompt and read its stream to the end."""
        return await self.submit(prompt).result()

    async def health(self) -> bool:
        """`/health`: the Health rpc while it believes the shards, else a Prefill of one token.

        It believes them until a client has read an error, and again once a Prefill was answered.
        """
        try:
            if self.healthy:
                await self._shards.health()
            else:
                await self.probe()
        except ShardError:
            self.healthy = False
        else:
            self.healthy = True
        return self.healthy

    async def probe(self) -> None:
        """The liveness Prefill, outside the queue and beside whatever runs.

        Raises:
            ShardError: it failed.
            BrokenPromise: its batch stays cached: nobody would ever clear it.
        """
        reply = await self._shards.prefill(liveness(self._wire))
        if reply.batch is not None:
            raise BrokenPromise(f"the liveness batch stays cached: {reply.batch}")

    # --- what the batching loop reports -------------------------------------------------------

    def ended(self, entry: Entry, last: GeneratedText) -> None:
        """Finish a request, or send it again where only its turn is over."""
        stream = entry.stream
        stream.put_text(last.text)
        long = last.finish_reason == FinishReason.LENGTH and stream.received < entry.wanted_tokens
        if long:
            try:
                self._append(self._validation.rest(entry, last.text, entry.ids))
            except ValidationError:
                long = False
        if not long:
            stream.finish(last)

    def stepped(self) -> None:
        if self._wire.name == "v1":
            self.healthy = True

    def failed(self, *, heard: bool) -> None:
        if heard or self._wire.name == "v1":
            self.healthy = False

    def _append(self, entry: Entry) -> None:
        self.queue.append(entry)
        if self.died is None:
            self._batching.wake()

    async def _run(self) -> None:
        try:
            await self._batching.run()
        except (RouterPanic, BrokenPromise) as error:
            self._die(error)
        except Exception as error:
            self._die(RouterPanic(repr(error)))
            raise

    def _die(self, cause: RouterPanic | BrokenPromise) -> None:
        self.died = cause
        for stream in self._open:
            if not stream.over:
                stream.fail(cause)
        self._batching.idle.set()


def liveness(wire: Wire) -> Batch:
    """The batch of a liveness probe."""
    request = Request(
        id=LIVENESS_ID,
        inputs="liveness",
        truncate=1 if wire.name == "v3" else 10,
        max_new_tokens=1,
        add_special_tokens=False,
        blocks=(0,),
        slots=(0,),
    )
    return Batch(LIVENESS_ID, (request,), max_tokens=2, max_blocks=1)
