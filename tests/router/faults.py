"""What can go wrong between a router and a shard, by how far the harm goes."""

from __future__ import annotations


class StartupError(Exception):
    """The router prints this line and exits."""


class RouterPanic(AssertionError):
    """A task of the router dies. After the batching task's panic every request hangs; `/health`
    says OK.
    """


class BrokenPromise(AssertionError):
    """A reply that breaks the protocol in a way that a router would not notice.

    The double stops there, because what follows would be blamed on something else.
    """


class RequestLost(AssertionError):
    """A request that the shard forgot: its client hangs, or reads `Incomplete generation`."""

    def __init__(self, request_id: int, why: str) -> None:
        super().__init__(f"request {request_id} is lost: {why}")
        self.request_id = request_id
