"""Families that we don't have: transformers' code, over our pool and with our attention."""

from __future__ import annotations

import pytest
import torch
from golden_kinds import TIER_KINDS
from hand_scheduler import HandScheduler
from walks import walk

from tokenpod.models.load import load_model


@pytest.mark.parametrize("name", TIER_KINDS)
def test_the_model_says_what_transformers_says(name, golden, text):
    checkpoint = golden(name)
    walk(HandScheduler(load(checkpoint.folder), slots=1024), text, 32).check(checkpoint)


def load(folder, **more):
    return load_model(
        folder,
        dtype=None,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=256,
        **more,
    )
