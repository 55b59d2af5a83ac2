"""Pods whose drafts come of heads, each kind by its flag: the tokens are those of none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import eagle_heads, medusa_heads, mtp_layers
from support.checkpoints.demo import DEMO
from support.clients.public_api import ask, once
from support.pods.harness import serve
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub


def mtp(folder: Path) -> tuple[str, ...]:
    """The layer of the served model's own checkpoint."""
    made = mtp_layers.make_predicting("deepseek-v3", folder / "model", vocab_size=4096).folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, made)
    return "--model-id", str(made), "--draft-model", "mtp"


def eagle(folder: Path) -> tuple[str, ...]:
    return "--draft-model", str(eagle_heads.save(folder / "head"))


def medusa(folder: Path) -> tuple[str, ...]:
    return "--draft-model", str(medusa_heads.save(folder / "heads"))


@pytest.mark.parametrize(
    ("flags", "method"),
    [(mtp, "mtp"), (eagle, "eagle3"), (medusa, "medusa")],
    ids=["mtp", "eagle", "medusa"],
)
@pytest.mark.sampled(3, "slow")
def test_a_pod_drafts_by_them(flags: Any, method: str, tmp_path: Path) -> None:
    limits = ("--max-total-tokens", "96", "--max-batch-size", "2", "--dtype", "float32")
    with serve("--speculate", "2", *limits, *flags(tmp_path)) as pod:
        api = GenerationServiceStub(pod.channel())
        model = api.GetModel(service.GetModelRequest(), timeout=30).model
        assert (model.draft_method, model.limits.max_draft_tokens) == (method, 2)
        asked = {
            "token_ids": {"ids": [5, 17, 301, 44]},
            "sampling": {"temperature": 0.8, "seed": 3},
        }
        asked["stopping"] = {"max_new_tokens": 40, "ignore_eos": True}
        drafted, plain = (once(api, ask(**asked, **more)) for more in ({}, {"max_draft_tokens": 0}))
        assert drafted.results[0].tokens.token_ids == plain.results[0].tokens.token_ids
        assert drafted.usage.drafted_token_count > 0
        assert plain.usage.drafted_token_count == 0
        assert pod.stop() == 0


def test_a_model_without_such_a_layer_is_told_so() -> None:
    said = "draft_model is mtp: LlamaForCausalLM has no layers that predict further tokens"
    with (
        pytest.raises(AssertionError, match=said),
        serve("--speculate", "2", "--draft-model", "mtp"),
    ):
        pass
