"""Layers that predict further tokens in executors: drafts are the definition's, tokens the same."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints.mtp_layers import make_predicting
from support.engines.demo_engine import CPU, SAMPLED
from support.engines.head_drafts import MOST, answer, drafts_behind
from support.steps import step_scenes
from tokenpod.core.errors import EngineError
from tokenpod.core.messages import MTP, EngineOptions
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.drafts.draft import load_draft
from tokenpod.engine.run import _method
from tokenpod.models.load import load_model

PROMPT = [5, 9, 3, 17, 11, 2, 8, 14, 6, 21, 4]


@pytest.fixture(scope="module", params=["deepseek-v3", "qwen3-5"])
def predicting(request, tmp_path_factory):
    return make_predicting(request.param, tmp_path_factory.mktemp("mtp") / "model")


def options_of(folder):
    return EngineOptions(
        model_folder=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        max_batch_size=2,
        max_batch_prefill_tokens=16,
        speculate=MOST,
        draft_folder=MTP,
    )


def loaded(folder, device=CPU):
    served = load_model(
        folder, dtype=torch.float32, device=device, progress=lambda done, total: None, drafts=MOST
    )
    return served, load_draft(options_of(folder), served, 64, device)


@pytest.mark.compute
def test_what_an_engine_drafts_is_what_the_definition_says(predicting):
    """In pieces of prompts, behind a prefix of the cache, and behind wrong drafts."""
    served, head = loaded(predicting.folder)
    assert _method(options_of(predicting.folder)) == "mtp"
    prompts = [PROMPT, [*PROMPT[:8], 7, 12]]
    asked = [
        Request([1 + i], prompt, SamplingParams(), StoppingParams(8), drafts=MOST)
        for i, prompt in enumerate(prompts)
    ]
    asked.append(Request([3], PROMPT, SAMPLED, StoppingParams(8), drafts=MOST))
    link, drafted = answer(served, asked, head, prefill=6)
    plain, _ = answer(served, asked, prefill=6)
    assert link.tokens == plain.tokens
    assert link.load.cached_tokens > 4
    for i, prompt in enumerate(prompts):
        text = [*prompt, *link.tokens[1 + i]]
        assert len(drafted[i]) >= 3
        for (_, known), drafts in drafted[i].items():
            one, _ = predicting.guesses(text[:known])

            def two(token, part=text[:known]):
                return predicting.guesses(part, token)[1]

            assert drafts == drafts_behind(one[-1], two, len(drafts))


def test_a_model_without_such_layers_is_refused_in_one_line(shared):
    folder = step_scenes.small_model(shared, layers=3)
    served = load_model(folder, dtype=torch.float32, device=CPU, progress=lambda done, total: None)
    options = options_of(folder)
    with pytest.raises(EngineError, match=r"draft_model is mtp: .* no layers that predict further"):
        load_draft(options, served, 64, CPU)
