"""LoRA on the embedding and the head beside a base: what PEFT itself makes of the same files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden_kinds import MAX_POSITIONS
from support.checkpoints.lora_folders import merge, write_lora
from support.steps.hand_scheduler import Adapted
from support.steps.lockstep import in_lockstep
from tokenpod.models.adapters.store import Space
from tokenpod.models.adapters.targets import slot_numbers, vocabulary_numbers
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import WHOLE, Shard

TOLERANCE = 2e-5
SPACE = Space(slots=3, rank=8, vocabulary=True)
#: What the embedding and the head, and a product, are called.
NAMES = ("embed_tokens", "lm_head", "q_proj")
BASES = {
    "llama": NAMES,
    "llama-grouped-tied": NAMES,
    "gemma2": NAMES,
    # Its embedding is scaled after given ones have taken their places.
    "granite": NAMES,
    # Its embedding has another width than its layers.
    "opt-350m": ("embed_tokens", "lm_head", "fc1"),
    "gpt-neox": ("embed_in", "embed_out", "dense_h_to_4h"),
}


def targets_of(base: str) -> tuple[dict[str, Any], ...]:
    """What is adapted by the first adapter, and by the second."""
    embedding, head, product = BASES[base]
    rooted = {"use_rslora": True, "alpha_pattern": {embedding: 5}}
    return (
        {"target_modules": [embedding, head, product], "rank_pattern": {head: 6}},
        {"target_modules": [embedding], **rooted},
    )


def load(folder: Path, space: Space | None = SPACE, **more: Any):
    return load_model(
        folder,
        **{"dtype": None, "device": torch.device("cpu"), "max_total_tokens": MAX_POSITIONS} | more,
        progress=lambda done, total: None,
        adapters=space,
    )


def put(model, folder: Path, number: int = 1) -> None:
    model.adapters.keep(number, model.adapters.read(folder))
    model.adapters.put(number, number)


def scores(schedule, model, slots, texts):
    """[positions, vocabulary] of rows in one step."""
    step = schedule(Adapted(model, slots))
    return step.step([(step.sequence(tokens), len(tokens)) for tokens in texts])


@pytest.fixture(scope="module")
def by_peft(golden, tmp_path_factory):
    """Of a base, settings and a text: the folder that PEFT saves, and the scores that it has."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def make(base: Path, tokens: list[int], **settings: Any) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp("peft")
        torch.manual_seed(sum(map(len, settings)))
        config = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves embeddings, and that they are tied
            plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            model = peft.get_peft_model(plain, peft.LoraConfig(**config | settings)).eval()
            model.save_pretrained(folder)
        with torch.no_grad():
            (logits,) = model(torch.tensor([tokens])).logits
        return folder, logits.log_softmax(-1)

    return make


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("base", BASES)
def test_rows_have_what_peft_makes_of_their_adapter(base, golden, schedule, text, by_peft):
    """Two adapters and none in one step; a tied table, and one that is scaled."""
    folder, texts = golden(base).folder, [text(7), text(5, seed=1), text(6, seed=2)]
    model, expected = load(folder), []
    both = zip(texts, targets_of(base), strict=False)
    for number, (tokens, settings) in enumerate(both, start=1):
        adapter, wanted = by_peft(folder, tokens, **settings)
        # PEFT saves the base's own tables beside the factors.
        names = load_file(adapter / "adapter_model.safetensors")
        beside = any(name.endswith(".base_layer.weight") for name in names)
        assert beside == ("embed_tokens" in BASES[base])
        put(model, adapter, number)
        expected.append(wanted)
    expected += scores(schedule, load(folder, None), [0], texts[2:])
    found = scores(schedule, model, [1, 2, 0], texts)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=TOLERANCE)


def test_a_head_that_peft_ties_to_the_embedding_has_factors_of_its_own(
    golden, schedule, text, by_peft, tmp_path
):
    """`ensure_weight_tying` alone makes factors of an embedding count for a head that is it."""
    folder, tokens = golden("llama-grouped-tied").folder, text(6)
    embedding = {"target_modules": ["embed_tokens"]}
    tied, expected = by_peft(folder, tokens, **embedding, ensure_weight_tying=True)
    model = load(folder)
    put(model, tied)
    torch.testing.assert_close(
        scores(schedule, model, [1], [tokens])[0], expected, rtol=1e-5, atol=TOLERANCE
    )
    weights = tied / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({n: t for n, t in tensors.items() if "lm_head.lora" not in n}, weights)
    with pytest.raises(ModelError, match=r"ensure_weight_tying is true, and .* embedding alone"):
        model.adapters.read(tied)
    alone, other = by_peft(folder, tokens, **embedding)
    put(model, alone)
    torch.testing.assert_close(
        scores(schedule, model, [1], [tokens])[0], other, rtol=1e-5, atol=TOLERANCE
    )
    assert (other - expected).abs().max() > 100 * TOLERANCE


#: Ranks of modules; the head has another than the embedding, the layers another yet.
MODULES = {"model.embed_tokens": 5, "lm_head": 3, "model.layers.0.mlp.up_proj": 4}


def write(folder: Path, base: Path, modules: dict[str, int], seed: int = 0, **more: Any):
    ranks = {"rank_pattern": {"x": 5, "y": 3}}
    return write_lora(
        folder, base, modules, seed=seed, embedding="model.embed_tokens", **more | ranks
    )


def two_adapters(folder: Path, base: Path) -> list[Path]:
    """One of all, one of the head alone, and one of a layer alone."""
    head, layer = {"lm_head": 3}, {"model.layers.0.mlp.up_proj": 4}
    every = (MODULES, head, layer)
    return [write(folder / str(n), base, own, seed=n).folder for n, own in enumerate(every)]


@pytest.mark.parametrize("base", ["llama", "llama-grouped-tied"])
def test_ranks_add_together_what_one_does(base, golden, schedule, text, tmp_path):
    """A vocabulary of which the last rank has fewer words than the others."""
    folder = golden(base, vocab_size=95).folder
    adapters = two_adapters(tmp_path, folder)
    texts = [[token % 95 for token in text(6, seed=n)] for n in range(4)]

    def said(**more: Any) -> torch.Tensor:
        with torch.inference_mode():
            model = load(folder, **more)
            for number, adapter in enumerate(adapters, start=1):
                put(model, adapter, number)
            return torch.cat(scores(schedule, model, [1, 0, 2, 3], texts))

    expected = said()

    def rank(group) -> torch.Tensor:
        torch.set_num_threads(1)
        return said(shard=Shard(group.rank, 2), group=group)

    for found in in_lockstep(2, rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    plain = torch.cat(scores(schedule, load(folder, None), [0] * 4, texts))
    assert torch.equal(expected[6:12], plain[6:12])
    assert (expected - plain)[:6].abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_a_head_in_fewer_bits_is_adapted_too(quantize, golden, schedule, text, tmp_path):
    base = golden("llama-grouped-tied").folder
    lora = write(tmp_path / "a", base, MODULES)
    model = load(base, quantize=quantize, quantize_head=True)
    put(model, lora.folder)
    plain, found = (scores(schedule, model, [slot], [text(6)])[0] for slot in (0, 1))
    merged = load(merge(base, lora, tmp_path / "m"), None)
    (wanted,) = scores(schedule, merged, [0], [text(6)])
    # Rounding moves both alike.
    assert (found - wanted).abs().mean() < 0.2 * (plain - wanted).abs().mean()


def test_a_slot_forgets_factors_of_the_vocabulary(golden, schedule, text, tmp_path):
    base = golden("llama").folder
    full, _, layer = two_adapters(tmp_path, base)
    model, fresh = load(base), load(base)
    put(model, full)
    put(model, layer, number=1)
    put(fresh, layer)
    found, wanted = (scores(schedule, each, [1], [text(5)])[0] for each in (model, fresh))
    assert torch.equal(found, wanted)


def test_slots_take_for_it_what_is_counted_beforehand(golden):
    base = golden("gpt-neox").folder
    layout = read_layout(base, None, MAX_POSITIONS)
    numbers = 3 * (
        slot_numbers(layout.weights, WHOLE, 8) + vocabulary_numbers(layout.weights, WHOLE, 8)
    )
    own = load(base).adapters
    assert own.nbytes == 4 * numbers + own.scales.nbytes


def test_whole_tables_of_one_adapter_stand_beside_factors_of_another(
    golden, schedule, text, tmp_path
):
    base = golden("llama-grouped-tied").folder
    layer = {"model.layers.0.mlp.up_proj": 4}
    made = [
        write(tmp_path / "a", base, MODULES),
        write(tmp_path / "b", base, layer, seed=1, whole=("model.embed_tokens", "lm_head")),
        # One of each kind.
        write(tmp_path / "c", base, {"lm_head": 3}, seed=2, whole=("model.embed_tokens",)),
    ]
    model = load(base, Space(3, 8, heads=3, vocabulary=True))
    texts, slots = [text(5, seed=n) for n in range(4)], [2, 0, 1, 3]
    for number, lora in enumerate(made, start=1):
        put(model, lora.folder, number)
    for own, slot, tokens in zip(scores(schedule, model, slots, texts), slots, texts, strict=True):
        folder = merge(base, made[slot - 1], tmp_path / f"m{slot}") if slot else base
        (wanted,) = scores(schedule, load(folder, None), [0], [tokens])
        torch.testing.assert_close(own, wanted, rtol=0, atol=TOLERANCE)


REFUSED = {
    "no room": ({}, r"lm_head.lora_A.weight: there is no room .*--lora-vocabulary"),
    "another vocabulary": (
        {"model.embed_tokens.lora_embedding_A": torch.zeros(5, 9)},
        r"embed_tokens has lora_A \[5, 9\] .* inputs and",
    ),
    "another width": ({"lm_head.lora_A.weight": torch.zeros(3, 9)}, r"lm_head has lora_A \[3, 9\]"),
    "too large a rank": (
        {"lm_head.lora_A.weight": torch.zeros(9, 64), "lm_head.lora_B.weight": torch.zeros(96, 9)},
        r"lm_head has rank 9; at most 8 is served .--max-adapter-rank",
    ),
    "half of it": ({"lm_head.lora_B.weight": None}, r"lm_head.lora_A.weight: .* belong together"),
    "lengths": ({"lm_head.lora_magnitude_vector.weight": torch.ones(96)}, r"magnitude_vector"),
    "both": ({"lm_head.weight": torch.zeros(96, 64)}, "it has a whole head, and factors of it"),
    "another base": (
        {"model.embed_tokens.base_layer.weight": torch.ones(96, 64)},
        r"embed_tokens.base_layer.weight is not the base's own in rows 0 to",
    ),
    "more words": (
        {"lm_head.base_layer.weight": torch.ones(97, 64)},
        r"lm_head.base_layer.weight is \[97, 64\]; the base's is \[96, 64\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_the_tensor_that_is_wrong(case, golden, tmp_path):
    tensors, said = REFUSED[case]
    base = golden("llama").folder
    more = {"modules_to_save": ["lm_head"]} if case == "both" else {}
    lora = write(tmp_path / "a", base, MODULES if case != "no room" else {"lm_head": 3}, **more)
    weights = lora.folder / "adapter_model.safetensors"
    stored = load_file(weights) | {f"base_model.model.{n}": t for n, t in tensors.items()}
    save_file({n: t for n, t in stored.items() if t is not None}, weights)
    model = load(base, Space(1, 8, heads=1, vocabulary=case != "no room"))
    with pytest.raises(ModelError, match=said) as refused:
        model.adapters.read(lora.folder)
    assert "\n" not in str(refused.value)


def test_the_bases_own_tables_may_be_of_fewer_bits(golden, tmp_path):
    """PEFT saves them in the kind of numbers in which it was trained."""
    base = golden("llama").folder
    lora = write(tmp_path / "a", base, MODULES)
    weights, own = lora.folder / "adapter_model.safetensors", load_file(base / "model.safetensors")
    table = own["model.embed_tokens.weight"].to(torch.bfloat16)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    save_file(load_file(weights) | {name: table}, weights)
    assert load(base).adapters.read(lora.folder).largest_rank == 5
