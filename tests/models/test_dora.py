"""DoRA beside a base: what PEFT computes, on one rank and several, whatever the base's format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden_kinds import MAX_POSITIONS
from support.checkpoints.lora_folders import merge, write_lora
from support.steps.lockstep import in_lockstep
from tokenpod.models.adapters.scales import _ROWS
from tokenpod.models.adapters.store import Space
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import WHOLE, Shard

TOLERANCE = 2e-5
UP = "model.layers.0.mlp.up_proj"


def load(folder, space=None, **more):
    return load_model(
        folder,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
        adapters=space,
        **{"dtype": None, **more},
    )


class Adapted:
    """A model of which all rows have the adapter in slot 1."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, pool):
        return self._model.forward(replace(batch, t_adapter=torch.ones_like(batch.t_token)), pool)

    def logits(self, hidden):
        return self._model.logits(hidden)


def logprobs(model, schedule, tokens):
    scheduler = schedule(model)
    return scheduler.step([(scheduler.sequence(tokens), len(tokens))])[0]


def put(model, folder):
    model.adapters.keep(1, model.adapters.read(folder))
    model.adapters.put(1, 1)
    return Adapted(model)


#: By golden family: modules, and what PEFT's config says besides. GPT-2's weights are transposed,
#: and GPT-2 and Qwen 2 have biases, of which PEFT scales none.
OF_PEFT = {
    "llama": (["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], {"use_rslora": True}),
    "qwen2": (["k_proj", "q_proj", "gate_proj"], {"alpha_pattern": {"k_proj": 5}}),
    "gpt2": (["c_attn", "c_fc", "c_proj"], {"bias": "lora_only"}),
}


@pytest.mark.compute
@pytest.mark.parametrize("family", OF_PEFT)
def test_it_is_what_peft_computes(family, golden, schedule, text, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    modules, more = OF_PEFT[family]
    base, tokens = golden(family).folder, text(9)
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=modules, use_dora=True, lora_dropout=0.3, **more
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_magnitude" in name:
                value.mul_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.requires_grad:
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
        expected = theirs(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    theirs.save_pretrained(tmp_path / "a")
    model = put(load(base, Space(1, 8)), tmp_path / "a")
    found = logprobs(model, schedule, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    plain = logprobs(load(base), schedule, tokens)
    assert (found - plain).abs().max() > 0.1


#: By golden family: what modules' names begin with, and modules of both kinds of division.
DIVIDED = {
    "llama-grouped-tied": ("model.layers.{i}.", ("self_attn.k_proj", "self_attn.o_proj", UP[15:])),
    "gemma2": ("model.layers.{i}.", ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")),
    "gpt-neox": ("gpt_neox.layers.{i}.", ("attention.query_key_value", "attention.dense")),
    "opt-350m": ("model.decoder.layers.{i}.", ("self_attn.out_proj", "fc1", "fc2")),
}


@pytest.mark.parametrize("family", DIVIDED)
def test_ranks_together_have_the_lengths_of_one(family, golden, schedule, text, tmp_path):
    """Of products whose inputs they divide each has a summand; a bias is added once, unscaled."""
    base, tokens = golden(family).folder, text(9)
    prefix, parts = DIVIDED[family]
    modules = {prefix.format(i=i) + part.lstrip("."): 4 for i in range(2) for part in parts}
    biases = [name for name in modules if family in ("gpt-neox", "opt-350m")]
    lora = write_lora(
        tmp_path / "a", base, modules, use_dora=True, biases=tuple(biases), bias="all"
    )

    def rank(group):
        shard = Shard(group.rank, group.world) if group else WHOLE
        model = put(load(base, Space(2, 4), shard=shard, group=group), lora.folder)
        return logprobs(model, schedule, tokens)

    expected = logprobs(load(merge(base, lora, tmp_path / "m")), schedule, tokens)
    for found in (rank(None), *in_lockstep(2, rank)):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("quantize", "dtype", "rank"),
    [("int8", None, 3), ("fp8", None, 3), ("int4", None, 3), (None, torch.bfloat16, _ROWS + 3)],
)
def test_lengths_are_those_of_the_weights_as_they_are_served(
    quantize, dtype, rank, golden, tmp_path, monkeypatch
):
    """Of more ranks than are multiplied at once, too; what is not adapted stays as it is."""
    from tokenpod.models.adapters import store

    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {UP: rank}, r=rank, use_dora=True)
    weights, measure = {}, store.Scales.measure

    def noted(self, name, weight):
        parts = getattr(weight, "parts", (weight,))
        whole = [p.float() if torch.is_tensor(p) else p.dequantised(torch.float32) for p in parts]
        weights[name] = torch.cat(whole)
        measure(self, name, weight)

    monkeypatch.setattr(store.Scales, "measure", noted)
    model = load(base, Space(1, 64), quantize=quantize, dtype=dtype)
    put(model, lora.folder)
    a, b, scale = lora.factors[UP]
    gates = len(b)
    moved = weights["0.up"][gates:] + scale * b @ a
    expected = lora.lengths[UP] / moved.norm(dim=1)
    own = model.adapters.scales.of("0.up")[0]
    torch.testing.assert_close(own[gates:], expected, rtol=5e-3, atol=0)
    assert torch.equal(own[:gates], torch.ones(gates))
    assert torch.equal(
        model.adapters.scales.of("0.qkv")[0], torch.ones_like(weights["0.qkv"][:, 0])
    )


def test_who_comes_into_a_slot_next_scales_nothing(golden, schedule, text, tmp_path):
    base, tokens = golden("llama").folder, text(6)
    dora = write_lora(tmp_path / "d", base, {UP: 4}, use_dora=True)
    lora = write_lora(tmp_path / "l", base, {UP: 4}, seed=1)
    model = load(base, Space(1, 4))
    put(model, dora.folder)
    adapted = put(model, lora.folder)
    expected = logprobs(load(merge(base, lora, tmp_path / "m")), schedule, tokens)
    found = logprobs(adapted, schedule, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


WRONG = {
    "no lengths": (None, f"use_dora is true, and there is no {UP}.lora_magnitude_vector"),
    "as many as inputs": (torch.ones(7), f"{UP}.lora_magnitude_vector is [7]; {UP} has"),
    "whole numbers": (torch.ones(112, dtype=torch.int32), "I32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_lengths_that_are_wrong_are_refused_by_name(case, golden, tmp_path):
    lengths, said = WRONG[case]
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {UP: 4}, use_dora=True)
    path = lora.folder / "adapter_model.safetensors"
    name = f"base_model.model.{UP}.lora_magnitude_vector"
    tensors = load_file(path)
    assert tensors.pop(name).shape == (112,)
    save_file(tensors if lengths is None else tensors | {name: lengths}, path)
    with pytest.raises(ModelError, match=r"^[^\n]+$") as caught:
        load(base, Space(1, 4)).adapters.read(lora.folder)
    assert said in str(caught.value)


def test_dora_of_the_head_is_refused_by_name(golden, tmp_path):
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {UP: 4, "lm_head": 4}, use_dora=True)
    with pytest.raises(ModelError, match=r"lm_head.lora_A.weight: use_dora is true, and DoRA of"):
        load(base, Space(1, 4, vocabulary=True)).adapters.read(lora.folder)
