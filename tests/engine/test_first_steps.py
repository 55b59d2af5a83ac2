"""What is found out before any request comes."""

from __future__ import annotations

import pytest
import torch
from demo_engine import CPU, DEMO, load

from tokenpod.core.errors import EngineError
from tokenpod.core.messages import EngineOptions
from tokenpod.engine.assemble import assemble

OPTIONS = EngineOptions(str(DEMO), "float32", "cpu", 1, 2, 64, max_batch_total_tokens=64)


def test_a_model_that_computes_no_numbers_does_not_start(monkeypatch):
    model = load(None)
    computed = model.logits
    monkeypatch.setattr(model, "logits", lambda *inputs: computed(*inputs) * torch.nan)
    with pytest.raises(EngineError, match=r"computes NaN or Inf of a prompt of 62 tokens.*--dtype"):
        assemble(model, OPTIONS, positions=64, device=CPU)
