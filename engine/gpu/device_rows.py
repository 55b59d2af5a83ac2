"""Rows of a sampler on a device, entered by one copy: each costs the device a few microseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.engine.steps.mailbox import upload

#: Tokens of one row, and what is added to their scores: [m] each.
Edits = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def enter_rows(
    rows: Sequence[int],
    words: npt.NDArray[np.int64],
    edits: Sequence[Edits],
    device_words: torch.Tensor,
    edit_ids: torch.Tensor,
    edit_values: torch.Tensor,
) -> None:
    """Enter rows' words, and their edits, in the order of the current stream.

    Args:
        rows: n of them, each once, at least one.
        words: [n, words] theirs.
        edits: n of them.
        device_words: [rows, words] int64 on the device.
        edit_ids: [rows, most] int32, contiguous, on the device: its rows' first m are written.
        edit_values: float32, likewise.
    """
    most = edit_ids.shape[1]
    places = [row * most + np.arange(len(of[0])) for row, of in zip(rows, edits, strict=True)]
    ids, values = (np.concatenate(part) for part in zip(*edits, strict=True))
    # All are numbers of 64 bits: a token and what is added to its score make one of them.
    pairs = np.stack((ids, values.view(np.int32)), axis=1).view(np.int64)[:, 0]
    numbers = np.concatenate([np.array(rows, np.int64), words.ravel(), *places, pairs])
    n, m = len(rows), len(ids)
    sent = upload(numbers, device_words.device)
    device_words.index_copy_(0, sent[:n], sent[n : n + words.size].view(words.shape))
    if m:
        edited, told = sent[-2 * m : -m], sent[-m:]
        edit_ids.view(-1).index_copy_(0, edited, told.view(torch.int32)[::2])
        edit_values.view(-1).index_copy_(0, edited, told.view(torch.float32)[1::2])
