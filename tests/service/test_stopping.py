"""What a signal means, by when it comes."""

from __future__ import annotations

from tokenpod.service.pod.stopping import Stopping


class Signals:
    """A `Stopping` whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended = 0
        self.stopping = Stopping(self._end, lambda: self.now)

    def _end(self) -> None:
        self.ended += 1

    def at(self, *seconds: float) -> bool:
        """Signals so long after the start; whether it is urgent then."""
        for second in seconds:
            self.now = 100.0 + second
            self.stopping.signal()
        return self.stopping.urgent


async def test_one_signal_asks_to_stop_and_hurries_nobody() -> None:
    signals = Signals()
    assert not signals.at(0.0)
    await signals.stopping.task()
    assert signals.ended == 0


async def test_one_signal_that_is_delivered_twice_is_one() -> None:
    assert not Signals().at(0.0, 0.004, 0.9)


async def test_a_second_one_a_second_later_is_urgent_once() -> None:
    signals = Signals()
    assert signals.at(0.0, 0.004, 1.0, 1.004, 5.0)
    assert signals.ended == 1
    await signals.stopping.sleep(1e6)
