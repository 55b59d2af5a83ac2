"""Every family that `test_device_models` lacks, once, through the captured steps of a GPU."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints.device_kinds import MODELS, ONCE
from support.checkpoints.golden import golden_config
from support.checkpoints.golden_kinds import KINDS
from support.engines.device_models import compare, peer_of, random_prompts, serve
from tokenpod.models.families import FAMILIES

#: Of numbers in matrices: the checkpoints are wider than others.
SPREAD = 0.04


def test_every_family_is_run_on_a_gpu():
    kinds = [kind for kind, _ in MODELS.values()] + [once.kind for once in ONCE]
    run = {golden_config(kind)["architectures"][0] for kind in kinds if kind in KINDS}
    assert not [x.architectures for x in FAMILIES if not run.intersection(x.architectures)]


@pytest.mark.gpu
@pytest.mark.parametrize("once", ONCE, ids=lambda once: once.kind)
def test_logprobs_and_greedy_tokens(once, golden):
    make = {"dtype": torch.bfloat16, "spread": SPREAD, **once.settings}
    folder = golden(once.kind, **make).folder
    peer, patch = peer_of(folder), KINDS[once.kind].patch
    if KINDS[once.kind].disguise is not None:
        peer = peer_of(golden(once.kind, disguised=False, **make).folder)

    def patched(dtype):
        model = peer(dtype)
        if patch is not None:
            patch(model)
        return model

    prompts = random_prompts([1, 7, 64, once.longest * 2 // 3, once.longest])
    compare(serve(folder, prompts), patched).check(once.error)
