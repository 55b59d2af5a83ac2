"""EAGLE-3 heads in the published format, against the definition in torch, on random weights."""

from __future__ import annotations

import json
import math

import pytest
import torch
from demo_engine import CPU, load
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.pool import KVPool
from tokenpod.models.eagle import is_eagle, load_eagle, read_eagle
from tokenpod.models.errors import ModelError

HIDDEN, HEADS, KEYS, DIM, INNER, GUESSES, VOCABULARY = 256, 4, 2, 64, 96, 300, 4096
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": GUESSES,
    "torch_dtype": "float32",
}


def tensors(layer="midlayer."):
    """Random weights, by the names that the authors publish."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{layer}self_attn.q_proj.weight": (HEADS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KEYS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KEYS * DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        "lm_head.weight": (GUESSES, HIDDEN),
    }
    made = {name: torch.randn(shape) / math.sqrt(shape[1]) for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"{layer}{norm}.weight" for norm in norms), "norm.weight"):
        made[name] = 1 + torch.randn(HIDDEN) / 4
    known = torch.randperm(VOCABULARY)[:GUESSES].sort().values
    made["d2t"] = known - torch.arange(GUESSES)
    made["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, known, True)
    return made


def save(folder, made=None, **fields):
    folder.mkdir(exist_ok=True)
    save_file(made or tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return folder


def defined(w, table, tokens, streams):
    """The definition: tokens from 1 on, each with the feature of the one before, and a guess more.

    Returns logits [n, vocabulary] behind each entry, and those behind a further token, whose
    feature is the last entry's stream.
    """

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def turned(x, positions):
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def layer(embedded, feature):
        at, n = "midlayer.", len(embedded)
        x = torch.cat(
            [norm(embedded, f"{at}input_layernorm"), norm(feature, f"{at}hidden_norm")], 1
        )
        q, k, v = ((x @ w[f"{at}self_attn.{p}_proj.weight"].T).view(n, -1, DIM) for p in "qkv")
        q, k = (turned(each, torch.arange(n)) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // KEYS, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        scores += torch.full((n, n), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        feature = feature + mixed @ w[f"{at}self_attn.o_proj.weight"].T
        inner = norm(feature, f"{at}post_attention_layernorm")
        gate, up = (inner @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return feature + (silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T

    def said(stream):
        logits = torch.full((len(stream), VOCABULARY), -torch.inf)
        logits[:, torch.arange(GUESSES) + w["d2t"]] = norm(stream, "norm") @ w["lm_head.weight"].T
        return logits

    feature = streams @ w["fc.weight"].T
    entries = layer(table[tokens[1:]], feature[:-1])
    guess = said(entries)[-1:].argmax(-1)
    more = layer(table[torch.cat([tokens[1:], guess])], torch.cat([feature[:-1], entries[-1:]]))
    return said(entries), said(more)[-1]


def batch_of(tokens, positions, slots, context):
    """A step of one row whose tokens are the last of `context` entries."""
    n = len(tokens)
    return ForwardBatch(
        t_token=tokens,
        t_position=positions,
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
    return load(None)


def test_guesses_are_those_of_the_definition(tmp_path, served):
    folder = save(tmp_path / "head")
    assert is_eagle(folder)
    head = load_eagle(folder, served, positions=64, device=CPU)
    assert head.taps == (2, 4, 5)
    n = 9
    tokens = torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(2))
    streams = torch.randn(n, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
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
    assert torch.isfinite(further).sum() == GUESSES


def served_file():
    from demo_engine import DEMO

    return DEMO / "model.safetensors"


def test_a_head_may_be_named_as_others_do_and_have_its_own_embedding(tmp_path, served):
    made = tensors("layers.0.")
    made["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN)
    plain = load_eagle(save(tmp_path / "plain"), served, positions=64, device=CPU)
    own = load_eagle(save(tmp_path / "own", made), served, positions=64, device=CPU)
    assert own.weight_bytes == plain.weight_bytes + 4 * VOCABULARY * HIDDEN


@pytest.mark.parametrize(
    ("change", "fields", "problem"),
    [
        ({"fc.weight": None}, {}, "the tensor fc.weight is missing"),
        ({"d2t": None}, {}, "the tensor d2t is missing"),
        ({"d2t": torch.full((GUESSES,), VOCABULARY)}, {}, "names tokens beyond the 4096"),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, {}, r"d2t has shape \[7\]"),
        ({}, {"target_hidden_size": 512}, "it reads 512 features, and the served .* has 256"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        ({"lm_head.weight": torch.zeros(9, HIDDEN)}, {}, r"lm_head.weight has shape \[9, 256\]"),
    ],
)
def test_what_is_no_such_head_is_refused_by_name(tmp_path, served, change, fields, problem):
    made = {n: t for n, t in (tensors() | change).items() if t is not None}
    with pytest.raises(ModelError, match=problem):
        load_eagle(save(tmp_path / "head", made, **fields), served, positions=64, device=CPU)


def test_a_slot_has_room_for_keys_values_and_a_feature(tmp_path):
    spec = read_eagle(save(tmp_path / "head"))
    assert sum(layout.numbers for layout in spec.kv_layouts) == 2 * KEYS * DIM + HIDDEN
