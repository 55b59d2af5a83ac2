"""Values on their way to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenpod.engine.steps.mailbox import Staging


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_begin_alike_whatever_their_length(dtype):
    """A kernel is compiled once more for a pointer that is aligned otherwise."""
    staging = Staging(torch.device("cpu"))
    for n in (1, 2, 7, 16, 33):
        values = np.arange(3 * n, dtype=dtype).reshape(3, n)
        sent = staging.upload(values)
        assert torch.equal(sent, torch.from_numpy(values))
        assert {row.data_ptr() % 64 for row in sent} == {sent.data_ptr() % 64}
        line = staging.upload(values[0])
        assert torch.equal(line, torch.from_numpy(values[0]))
