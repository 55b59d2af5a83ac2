"""How a pod stops without ending accepted requests: its own drain, and a follower's shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.pod.control_stream import DrainRequests
from tokenpod.service.pod.front_ends import FrontEnds
from tokenpod.service.pod.ranks import Ranks
from tokenpod.service.pod_state import PodState
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import AGAIN_SECONDS

log = logging.getLogger("tokenpod")

#: Seconds that closing connections takes, and some.
_CLOSING_SECONDS = AGAIN_SECONDS + 1.0
#: Seconds in which the last answers are sent when it is urgent.
_HASTE_SECONDS = 0.1
#: Seconds between two looks at what still runs.
_LOOK_SECONDS = 0.05

#: Why nothing is taken in until the group has formed again.
FORMING = "a rank was lost: the group is forming again"


async def drain(settings: ServerSettings, state: PodState, others: FrontEnds) -> None:
    """Stop the pod that clients call."""
    admission, stopping = state.admission, state.stopping
    log.info("draining", extra={"lame_duck_seconds": settings.lame_duck_seconds})
    await state.board.drain()
    await _lame_duck(settings, state)
    admission.drain()
    await _quiet(settings, state)
    state.stopped = {
        "cut_off": admission.counters.requests,
        "cut_off_batches": await state.backend.shard.end(stopping.sleep),
    }
    grace, patience = (_HASTE_SECONDS, 2 * _HASTE_SECONDS) if stopping.urgent else (0.5, None)
    # Closes the listener, so it comes last.
    await asyncio.gather(state.listener.stop(grace, stopping.sleep), others.stop(patience))


async def drain_for_follower(settings: ServerSettings, state: PodState) -> None:
    """A follower's pod is to stop: let running calls finish. The group ends with the pod."""
    log.info("a pod of the group stops: draining")
    await state.board.set_serving(False)
    await state.stopping.sleep(settings.lame_duck_seconds)
    state.admission.close(FORMING, state.startup.took)
    await _quiet(settings, state)


async def stop_follower(
    settings: ServerSettings, state: PodState, ranks: Ranks, drains: DrainRequests
) -> None:
    """Stop a follower's pod once the leader lets it."""
    log.info("stopping: asking the leader to drain")
    await state.board.drain()
    drained = asyncio.create_task(drains.ask())
    seconds = settings.lame_duck_seconds + settings.graceful_termination_timeout
    enough = asyncio.create_task(state.stopping.sleep(seconds))
    futures: set[asyncio.Future[Any]] = {drained, enough, ranks.lost}
    await asyncio.wait(futures, return_when="FIRST_COMPLETED")
    enough.cancel()
    drained.cancel()
    await asyncio.gather(drained, return_exceptions=True)
    await state.listener.stop(0.5, state.stopping.sleep)
    state.stopped = {}


def send_away(settings: ServerSettings, state: PodState) -> None:
    """The group is lost, and starts again: refuse new calls, and let clients find another copy."""
    admission, duck = state.admission, settings.lame_duck_seconds
    # Clients that follow the hint send no call while connections are closed: see `Closing`.
    away = max(state.startup.took, duck + _CLOSING_SECONDS)
    admission.close(FORMING, away)
    state.startup.begin()

    async def renew() -> None:
        log.info("closing connections: another copy may serve their clients")
        await state.listener.renew(admission.refusal(), state.stopping.sleep)

    if settings.leads:
        state.renewal.begin(max(duck - state.board.unready_seconds, 0.0), renew)


async def end_stalled(settings: ServerSettings, board: HealthBoard, ranks: Ranks) -> None:
    """End engines that never move again, and so the calls that wait for them, also in a drain."""
    await board.stuck
    seconds = f"{settings.stall_timeout:g} s (--stall-timeout)"
    ranks.give_up(f"no sign of it for {seconds}: it must be stuck")
    await ranks.stop()


async def _lame_duck(settings: ServerSettings, state: PodState) -> None:
    """Go on serving while endpoints hear of it; after a Ctrl-C only as long as anything runs."""
    began = time.monotonic()
    deadline = began + settings.lame_duck_seconds
    stopping = state.stopping
    if not stopping.interrupted:
        await stopping.sleep(settings.lame_duck_seconds)
        return
    while _busy(state, began) and time.monotonic() < deadline and not stopping.urgent:
        await stopping.sleep(_LOOK_SECONDS)


def _busy(state: PodState, since: float) -> bool:
    return bool(state.admission.counters.requests or state.backend.shard.awaited(since))


async def _quiet(settings: ServerSettings, state: PodState) -> None:
    """Wait until no request runs and no router has a batch, as long as the operator allows."""
    began = time.monotonic()
    deadline = began + settings.graceful_termination_timeout
    while _busy(state, began) and time.monotonic() < deadline and not state.stopping.urgent:
        await state.stopping.sleep(_LOOK_SECONDS)
