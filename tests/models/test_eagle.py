"""EAGLE-3 heads in the published format, against the definition in torch, on random weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoints.demo import DEMO as FOLDER
from support.checkpoints.eagle_heads import DEMO, defined, save, tensors
from support.engines.demo_engine import CPU, demo_model
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.eagle import is_eagle, load_eagle, read_eagle


def batch_of(tokens, positions, slots, context):
    """A step of one row whose tokens are the last of `context` entries."""
    n = len(tokens)
    return ForwardBatch(
        t_token=tokens,
        t_place=positions,
        t_slot=slots,
        b_start=[0, n],
        b_context=[context],
        b_runs=[[(1, 1 + context)]],
        b_row=[0],
        row_table=torch.zeros((0, 0), dtype=torch.int32),
        single_rows=int(n == 1),
        logit_index=None,
    )


@pytest.fixture(scope="module")
def served():
    return demo_model()


def test_guesses_are_those_of_the_definition(tmp_path, served):
    folder = save(tmp_path / "head")
    assert is_eagle(folder)
    head = load_eagle(folder, served, positions=64, device=CPU)
    assert head.taps == (2, 4, 5)
    n = 9
    tokens = torch.randint(DEMO.vocabulary, (n,), generator=torch.Generator().manual_seed(2))
    streams = torch.randn(n, 3 * DEMO.hidden, generator=torch.Generator().manual_seed(3))
    table = load_file(served_file())["model.embed_tokens.weight"].float()
    expected, further = defined(tensors(), table, tokens, streams)
    pool = KVPool(slots=16, layouts=head.config.kv_layouts, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        head.features(pool)[:n] = head.fuse(streams)
        slots = torch.arange(1, n)
        # In two pieces, as a prompt may be computed.
        found = []
        for part in (slice(0, 5), slice(5, 8)):
            own = slots[part]
            batch = batch_of(tokens[own], own - 1, own, int(own[-1]))
            found.append(head.forward(tokens[own], own - 1, batch, pool))
        stream = torch.cat(found)
        logits = head.logits(stream)
        assert torch.allclose(logits, expected, atol=1e-4)
        # One on: the entry's stream stands in for the feature of its position.
        head.features(pool)[n - 1] = stream[-1]
        at, guess = torch.tensor([n]), logits[-1:].argmax(-1)
        stream = head.forward(guess, at - 1, batch_of(guess, at - 1, at, n), pool)
        assert torch.allclose(head.logits(stream)[0], further, atol=1e-4)
    assert torch.isfinite(further).sum() == DEMO.guesses


def served_file():
    return FOLDER / "model.safetensors"


def test_a_head_may_be_named_as_others_do_and_have_its_own_embedding(tmp_path, served):
    made = tensors("layers.0.")
    made["embed_tokens.weight"] = torch.randn(DEMO.vocabulary, DEMO.hidden)
    plain = load_eagle(save(tmp_path / "plain"), served, positions=64, device=CPU)
    own = load_eagle(save(tmp_path / "own", made), served, positions=64, device=CPU)
    assert own.weight_bytes == plain.weight_bytes + 4 * DEMO.vocabulary * DEMO.hidden


@pytest.mark.parametrize(
    ("change", "fields", "problem"),
    [
        ({"fc.weight": None}, {}, "the tensor fc.weight is missing"),
        ({"d2t": None}, {}, "the tensor d2t is missing"),
        ({"d2t": torch.full((DEMO.guesses,), DEMO.vocabulary)}, {}, "names tokens beyond the 4096"),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, {}, r"d2t has shape \[7\]"),
        ({}, {"target_hidden_size": 512}, "it reads 512 features, and the served .* has 256"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({}, {"vocab_size": 5000}, "its vocabulary has 5000 tokens, and that of the .* 4096"),
        (
            {"lm_head.weight": torch.zeros(9, DEMO.hidden)},
            {},
            r"lm_head.weight has shape \[9, 256\]",
        ),
    ],
)
def test_what_is_no_such_head_is_refused_by_name(tmp_path, served, change, fields, problem):
    made = {n: t for n, t in (tensors() | change).items() if t is not None}
    with pytest.raises(ModelError, match=problem):
        load_eagle(save(tmp_path / "head", made, **fields), served, positions=64, device=CPU)


def test_a_slot_has_room_for_keys_values_and_a_feature(tmp_path):
    spec = read_eagle(save(tmp_path / "head"))
    assert (
        sum(layout.numbers for layout in spec.kv_layouts) == 2 * DEMO.keys * DEMO.dim + DEMO.hidden
    )
