"""The router's queue: first come, first served, and the first that does not fit blocks the rest."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.blocks import Allocation, BlockAllocator, round_up
from router.records import Batch, Request, ShardInfo
from router.startup import Limits
from router.streams import Prompt, Stream
from router.wire import Wire


@dataclass
class Entry:
    """A request in the queue or in a batch."""

    prompt: Prompt
    #: Tokens after truncation.
    input_length: int
    truncate: int
    stream: Stream
    #: Of this turn; a long request has several.
    max_new_tokens: int
    #: Of all turns.
    wanted_tokens: int
    allocation: Allocation = field(default_factory=Allocation)
    #: Given by the queue.
    request_id: int = -1
    #: Tokens of this turn so far.
    ids: list[int] = field(default_factory=list)
    #: Whether the shard forgot it; a router goes on waiting for it.
    lost: bool = False


@dataclass
class _Draft:
    """A batch while entries are taken for it."""

    entries: list[tuple[Entry, int | None]] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    longest_input: int = 0
    #: Nothing more may follow, though the last entry was taken.
    full: bool = False

    def take(self, entry: Entry, prefill: int, decode: int, chunk: int | None = None) -> None:
        self.prefill_tokens = prefill
        self.decode_tokens = decode
        self.longest_input = max(self.longest_input, entry.input_length)
        self.entries.append((entry, chunk))


class Queue:
    """Entries that wait, and the numbering of requests and batches."""

    def __init__(self, wire: Wire, info: ShardInfo, limits: Limits) -> None:
        self._info = info
        self._entries: deque[Entry] = deque()
        self._next_request_id = 0
        self._next_batch_id = 0
        self._wire = wire.name
        paged = wire.name == "v3" and not info.requires_padding
        self.allocator = (
            BlockAllocator(
                limits.max_batch_total_tokens,
                info.block_size,
                prefix_caching=info.use_prefix_caching,
                window_size=info.window_size,
            )
            if paged
            else None
        )

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entry: Entry) -> None:
        entry.request_id = self._next_request_id
        self._next_request_id += 1
        self._entries.append(entry)

    def release(self, entry: Entry) -> None:
        """Give back the blocks of an entry that left its batch."""
        if self.allocator is not None:
            self.allocator.release(entry.allocation)
            entry.allocation = Allocation()

    def next_batch(
        self,
        *,
        min_size: int | None,
        max_size: int | None,
        prefill_budget: int,
        token_budget: int,
    ) -> tuple[dict[int, Entry], Batch] | None:
        """The next batch and its entries by request id, or None when nothing may be sent.

        Budgets are tokens. Entries whose receiver is gone are dropped on the way.
        """
        if not self._entries or (min_size is not None and len(self._entries) < min_size):
            return None
        if max_size == 0 and self._wire != "v1":
            return None
        if self._wire == "v3" and (prefill_budget == 0 or token_budget == 0):
            return None
        draft = self._draft(max_size, round_up(prefill_budget, self._info.block_size), token_budget)
        if not draft.entries:
            return None
        if min_size is not None and len(draft.entries) < min_size:
            for entry, _ in reversed(draft.entries):
                self.release(entry)
                self._entries.appendleft(entry)
            return None
        return self._numbered(draft)

    def _draft(self, max_size: int | None, prefill_budget: int, token_budget: int) -> _Draft:
        draft = _Draft()
        while self._entries:
            entry = self._entries.popleft()
            if entry.stream.closed:
                continue
            if self.allocator is not None:
                fits = self._add_paged(draft, entry, prefill_budget, self.allocator)
            elif self._info.requires_padding:
                fits = self._add_padded(draft, entry, prefill_budget, token_budget)
            else:
                fits = self._add_rounded(draft, entry, prefill_budget, token_budget)
            if not fits:
                self._entries.appendleft(entry)
                break
            if draft.full or len(draft.entries) == max_size:
                break
        return draft

    def _add_padded(self, draft: _Draft, entry: Entry, prefill_budget: int, budget: int) -> bool:
        longest = max(draft.longest_input, entry.input_length)
        prefill = (len(draft.entries) + 1) * longest
        decode = draft.decode_tokens + entry.max_new_tokens
        if prefill > prefill_budget or prefill + decode + self._info.speculate > budget:
            return False
        draft.take(entry, prefill, decode)
        return True

    def _add_rounded(self, draft: _Draft, entry: Entry, prefill_budget: int, budget: int) -> bool:
        """v1's and v2's arithmetic for paged models: whole blocks, less what a window drops."""
        block, window = self._info.block_size, self._info.window_size
        new = entry.max_new_tokens
        if window is not None:
            new = min(max(window - entry.input_length, 0), new)
        prefill = draft.prefill_tokens + round_up(entry.input_length, block)
        decode = draft.decode_tokens + round_up(new, block)
        if prefill > prefill_budget or prefill + decode + self._info.speculate > budget:
            return False
        draft.take(entry, prefill, decode)
        return True

    def _add_paged(
        self, draft: _Draft, entry: Entry, prefill_budget: int, allocator: BlockAllocator
    ) -> bool:
        """v3's arithmetic: blocks are the budget, and no other, so that new tokens don't count in
        `max_tokens`.

        Nor does a chunk: a batch of one chunk says that its max_tokens is 0.
        """
        # Log probabilities of the whole prompt need all of it computed.
        ids = () if entry.prompt.prefill_logprobs else entry.prompt.ids[-entry.input_length :]
        tokens = entry.input_length + entry.max_new_tokens + self._info.speculate - 1
        allocation = allocator.allocate(tokens, ids)
        if allocation is None:
            return False
        prefill = draft.prefill_tokens + entry.input_length - allocation.cache_len
        chunk: int | None = None
        if prefill > prefill_budget:
            chunk = prefill_budget - draft.prefill_tokens
            if chunk == 0 or not self._info.support_chunking:
                allocator.release(allocation)
                return False
            prefill = draft.prefill_tokens
            draft.full = True
        entry.allocation = allocation
        draft.take(entry, prefill, 0, chunk)
        return True

    def _numbered(self, draft: _Draft) -> tuple[dict[int, Entry], Batch]:
        entries: dict[int, Entry] = {}
        requests: list[Request] = []
        for entry, chunk in draft.entries:
            entries[entry.request_id] = entry
            requests.append(self._request(entry, chunk))
        batch = Batch(
            self._next_batch_id,
            tuple(requests),
            max_tokens=draft.prefill_tokens + draft.decode_tokens,
            max_blocks=max(len(entry.allocation.blocks) for entry in entries.values()),
        )
        self._next_batch_id += 1
        return entries, batch

    def _request(self, entry: Entry, chunk: int | None) -> Request:
        prompt = entry.prompt
        return Request(
            id=entry.request_id,
            inputs=prompt.text,
            truncate=entry.truncate,
            max_new_tokens=entry.max_new_tokens,
            sampling=prompt.chooser,
            stop_sequences=prompt.stop_sequences,
            ignore_eos_token=prompt.ignore_eos_token,
            prefill_logprobs=prompt.prefill_logprobs,
            top_n_tokens=prompt.top_n_tokens,
            blocks=entry.allocation.blocks,
            slots=entry.allocation.slots,
            cache_len=entry.allocation.cache_len,
            chunk_len=chunk,
            adapter_id=prompt.adapter_id,
        )
