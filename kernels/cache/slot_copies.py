"""Tokens of a pool gathered into rows, layer after layer, and rows scattered into slots again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launcher import launched

#: Words of 32 bits that a program moves at a time.
BLOCK = 512


class SlotRows:
    """Moves what slots hold to rows and back: one launch for all layers.

    Args:
        tensors: of the pool, [slots, heads, dim] each, contiguous; a token's part is whole words of
            32 bits.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        words = [tensor[0].nbytes // 4 for tensor in tensors]
        assert all(tensor[0].nbytes % 4 == 0 for tensor in tensors)
        offsets = [sum(words[:at]) for at in range(len(words))]
        columns = [[tensor.data_ptr() for tensor in tensors], words, offsets]
        #: [3, tensors] int64: where each begins, the words of a token, and where they are in a row.
        self._parts = torch.tensor(columns, dtype=torch.int64, device=tensors[0].device)
        self._words = sum(words)

    @staticmethod
    def can_move(tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are such tensors, and there are any."""
        return bool(tensors) and all(
            each[0].nbytes % 4 == 0 and each.is_contiguous() for each in tensors
        )

    def rows(self, n: int) -> torch.Tensor:
        """[n, bytes] uint8: room for n tokens."""
        shape = (n, 4 * self._words)
        return torch.empty(shape, dtype=torch.uint8, device=self._parts.device)

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows [n, bytes] uint8, contiguous, become what slots [n] int64 hold."""
        self._move(slots, rows, to_rows=True)

    def scatter(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Slots [n] int64 hold what rows [n, bytes] uint8, contiguous, are."""
        self._move(slots, rows, to_rows=False)

    def _move(self, slots: torch.Tensor, rows: torch.Tensor, *, to_rows: bool) -> None:
        assert rows.is_contiguous()
        assert rows.shape == (len(slots), 4 * self._words), rows.shape
        layers = self._parts.shape[1]
        _move[(len(slots), layers)](
            self._parts,
            layers,
            slots,
            rows.view(torch.int32),
            self._words,
            TO_ROWS=to_rows,
            BLOCK=BLOCK,
            num_warps=4,
        )


# It does not overlap with its neighbours (`launch`): those write what it reads.


@launched
@triton.jit(do_not_specialize=["layers"])
def _move(parts, layers, slots, rows, row_words, TO_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    tensor = tl.load(parts + layer).to(tl.pointer_type(tl.int32))
    words = tl.load(parts + layers + layer)
    row = rows + token * row_words + tl.load(parts + 2 * layers + layer)
    slot = tensor + tl.load(slots + token) * words
    for first in range(0, words, BLOCK):
        i = first + tl.arange(0, BLOCK)
        if TO_ROWS:
            tl.store(row + i, tl.load(slot + i, mask=i < words), mask=i < words)
        else:
            tl.store(slot + i, tl.load(row + i, mask=i < words), mask=i < words)
