"""How TGI's benchmark drives a shard: every batch has id 0, request ids start at 0 each time."""

from __future__ import annotations

from router.client import ShardClient
from router.records import Batch, Request, StepReply


class Benchmark:
    """Runs of `size` requests of `sequence_length` prompt tokens and `decode_length` new ones."""

    def __init__(
        self, shard: ShardClient, *, size: int, sequence_length: int, decode_length: int
    ) -> None:
        self._shard = shard
        self._size = size
        self._sequence_length = sequence_length
        self._decode_length = decode_length

    async def run(self) -> dict[int, list[int]]:
        """Prefill, Decode to the end, ClearCache of everything; the tokens of each request."""
        tokens: dict[int, list[int]] = {each: [] for each in range(self._size)}
        reply = await self.prefill()
        _collect(reply, tokens)
        while reply.batch is not None:
            reply = await self._shard.decode([reply.batch])
            _collect(reply, tokens)
        await self._shard.clear_cache()
        return tokens

    async def prefill(self) -> StepReply:
        """Prefill alone: whatever has id 0 in the shard is overwritten."""
        length = self._sequence_length
        requests = tuple(
            Request(
                id=each,
                inputs="test " * length,
                truncate=length,
                max_new_tokens=self._decode_length,
                ignore_eos_token=True,
                slots=tuple(range(16)),
            )
            for each in range(self._size)
        )
        total = self._size * (length + self._decode_length)
        return await self._shard.prefill(Batch(0, requests, max_tokens=total))


def _collect(reply: StepReply, tokens: dict[int, list[int]]) -> None:
    for request_id, token in reply.token_ids():
        tokens[request_id].append(token)
