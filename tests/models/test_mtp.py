"""Layers that predict further tokens, against transformers' layers, on random weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from support.checkpoints.mtp_layers import PREDICTING, make_predicting
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.footprint import footprint_of
from tokenpod.models.load import load_model
from tokenpod.models.mtp import load_mtp

CPU = torch.device("cpu")
TOKENS = [5, 9, 3, 17, 11, 2, 8, 14, 6]


def served_by(folder):
    return load_model(folder, dtype=torch.float32, device=CPU, progress=lambda done, total: None)


def batch_of(tokens, first):
    """Entries of one row from this position on; entry p has slot p, and sees those from 1 on."""
    n = len(tokens)
    at = torch.arange(first, first + n)
    return ForwardBatch(
        t_token=torch.tensor(tokens),
        t_place=at - 1,
        t_slot=at,
        b_start=[0, n],
        b_context=[first + n - 1],
        b_runs=[[(1, first + n)]],
        b_row=[0],
        row_table=torch.zeros((0, 0), dtype=torch.int32),
        single_rows=int(n == 1),
        logit_index=None,
    )


#: Variants of kinds that every test run tries.
SLOW = {"glm4-moe-lite", "qwen3-5-moe-varied", "qwen3-next"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in PREDICTING
    ],
)
def made(request, tmp_path_factory):
    predicting = make_predicting(request.param, tmp_path_factory.mktemp("mtp") / "model")
    served = served_by(predicting.folder)
    return predicting, served, load_mtp(predicting.folder, served, positions=32, device=CPU)


def test_guesses_are_those_of_transformers_layer(made):
    predicting, _, head = made
    expected, further = predicting.guesses(TOKENS)
    n = len(TOKENS)
    pool = KVPool(slots=16, layouts=head.config.kv_layouts, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        head.features(pool)[:n] = predicting.features(TOKENS)
        # In two pieces, as a prompt may be computed.
        streams = []
        for first, end in ((1, 5), (5, n)):
            batch = batch_of(TOKENS[first:end], first)
            streams.append(head.forward(batch.t_token, batch.t_slot - 1, batch, pool))
        stream = torch.cat(streams)
        logits = head.logits(stream)
        assert torch.allclose(logits, expected, atol=2e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        head.features(pool)[n - 1] = stream[-1]
        batch = batch_of([int(logits[-1].argmax())], n)
        stream = head.forward(batch.t_token, batch.t_slot - 1, batch, pool)
        assert torch.allclose(head.logits(stream)[0], further, atol=2e-4)


def test_its_feature_is_what_the_served_model_says(made):
    predicting, served, head = made
    n = len(TOKENS)
    layouts = served.config.kv_layouts
    pool = served.pool_class(slots=16, layouts=layouts, dtype=torch.float32, device=CPU)
    whole = {"t_place": torch.arange(n), "b_context": [n], "b_runs": [[(0, n)]]}
    batch = replace(batch_of(TOKENS, 0), **whole)
    hidden, streams = served.forward_tapped(batch, pool, head.taps)
    features = head.features_of(hidden, streams)
    assert torch.allclose(features, predicting.features(TOKENS), atol=2e-4)


def test_what_it_takes_is_counted_before_it_is_loaded(made):
    predicting, _, head = made
    size = footprint_of(predicting.folder, mtp=True)
    assert size.weight_bytes(1, 4) == head.weight_bytes
    assert size.slot_bytes(1, "float32") == KVPool.bytes_per_slot(
        layouts=head.config.kv_layouts, dtype=torch.float32
    )


def test_a_checkpoint_without_such_a_layer_is_refused(made, tmp_path):
    predicting, served, _ = made
    folder = tmp_path / "model"
    shutil.copytree(predicting.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    none = dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), 0)
    (folder / "config.json").write_text(json.dumps(config | none))
    with pytest.raises(ModelError, match="has no layers that predict further tokens"):
        load_mtp(folder, served, positions=32, device=CPU)
