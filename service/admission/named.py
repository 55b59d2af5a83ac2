"""Calls that can be ended by their names, from whichever front end of the pod."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenpod.service.admission.call_names import CallNames

log = logging.getLogger("tokenpod.generate")

#: How often a front end looks whether another one wants the end of one of its calls.
_LOOK_SECONDS = 0.05


class NamedCalls:
    """The calls of this front end that have a name.

    Args:
        names: those of all front ends.
    """

    def __init__(self, names: CallNames) -> None:
        self._names = names
        self._stops: dict[int, Callable[[], None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def hold(self, name: str, stop: Callable[[], None]) -> int | None:
        """Hold a name, until `give_back`; its place, or None if it is taken.

        `stop` is called, at most once, if somebody wants the call's end.
        """
        place = self._names.take(name)
        if place is not None:
            self._stops[place] = stop
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
        return place

    def give_back(self, place: int) -> None:
        """The call of this place has ended."""
        del self._stops[place]
        self._names.give_back(place)

    def end(self, name: str) -> None:
        """End the call of this name, if there is one: here at once, elsewhere in a moment."""
        self._names.end(name)
        self._stop()

    async def _look(self) -> None:
        """Look for calls to end, for as long as there are any."""
        while self._stops:
            self._stop()
            await asyncio.sleep(_LOOK_SECONDS)
        self._looking = None

    def _stop(self) -> None:
        for place in self._names.to_end():
            if (stop := self._stops.get(place)) is not None:
                try:
                    stop()
                except Exception:
                    # Who ended this call, and the other calls, must not suffer for it.
                    log.exception("a call could not be ended by its name")
