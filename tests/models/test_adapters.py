"""LoRA adapters beside a base: what each token's adapter adds is what merging it would."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.golden_kinds import MAX_POSITIONS
from support.checkpoints.lora_folders import merge, write_lora
from support.steps.hand_scheduler import Adapted
from tokenpod.core.adapters import scale_bytes
from tokenpod.models.adapters import store
from tokenpod.models.adapters.store import Space
from tokenpod.models.adapters.targets import copied_numbers, scale_numbers, slot_numbers
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import Division

pytestmark = pytest.mark.compute

TOLERANCE = 2e-5

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

#: By golden family: what modules' names begin with, and the modules of a layer.
FAMILIES = {
    "llama": ("model.layers.{i}.", (*ATTENTION, *GATED)),
    "qwen2": ("model.layers.{i}.", ATTENTION[:2]),
    "gemma2": ("model.layers.{i}.", ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")),
    "phi3": ("model.layers.{i}.", ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    "gpt-neox": (
        "gpt_neox.layers.{i}.",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h"),
    ),
    "gpt2": ("transformer.h.{i}.", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "bloom": ("transformer.h.{i}.", ("self_attention.query_key_value", "mlp.dense_4h_to_h")),
    "falcon-7b": ("transformer.h.{i}.", ("self_attention.query_key_value", "mlp.dense_h_to_4h")),
    "opt-350m": ("model.decoder.layers.{i}.", ("self_attn.q_proj", "fc1", "fc2")),
    "deepseek-v2-lite": (
        "model.layers.{i}.",
        ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"),
    ),
}
TRANSPOSED = {"gpt2"}


def modules_of(family: str, rank: int = 4, layers: int = 2) -> dict[str, int]:
    """The first module of each layer has one rank less."""
    prefix, names = FAMILIES[family]
    return {
        prefix.format(i=i) + name: rank - (at == 0)
        for i in range(layers)
        for at, name in enumerate(names)
    }


def load(folder, space=None, dtype=None):
    return load_model(
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
        adapters=space,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_what_merging_their_adapter_gives(family, golden, schedule, text, tmp_path):
    """Two adapters of unlike ranks, one with DoRA, and none, in one step and in the next one."""
    base, transposed = golden(family).folder, family in TRANSPOSED
    patterns = {"rank_pattern": {"x": 3, "y": 6, "z": 5}}
    adapters = [
        write_lora(
            tmp_path / f"adapter{n}",
            base,
            modules_of(family, rank),
            seed=n,
            transposed=transposed,
            use_dora=n == 0,
            **patterns,
        )
        for n, rank in enumerate((4, 6))
    ]
    model = load(base, Space(slots=2, rank=8))
    for number, adapter in enumerate(adapters, start=1):
        model.adapters.keep(number, model.adapters.read(adapter.folder))
        model.adapters.put(number, number)
    texts = [text(7), text(5, seed=1), text(6, seed=2)]
    slots = [2, 0, 1]
    mixed = schedule(Adapted(model, slots))
    rows = [mixed.sequence(tokens) for tokens in texts]
    found = mixed.step([(row, len(tokens) - 1) for row, tokens in zip(rows, texts, strict=True)])
    last = mixed.step([(row, 1) for row in rows])
    for tokens, slot, first, second in zip(texts, slots, found, last, strict=True):
        folder = base
        if slot:
            folder = tmp_path / f"merged{slot}"
            merge(base, adapters[slot - 1], folder, transposed=transposed)
        alone = schedule(load(folder))
        (expected,) = alone.step([(alone.sequence(tokens), len(tokens))])
        torch.testing.assert_close(torch.cat([first, second]), expected, rtol=0, atol=TOLERANCE)


#: By golden family: its embedding, and its head.
TABLES = {
    "llama": ("model.embed_tokens", "lm_head"),
    "llama-grouped-tied": ("model.embed_tokens", "lm_head"),
    "gemma2": ("model.embed_tokens", "lm_head"),
}


@pytest.mark.parametrize("family", TABLES)
def test_rows_have_the_embedding_and_head_of_their_adapter(
    family, golden, schedule, text, tmp_path
):
    """Both of one, the head alone of another, an adapter without, and none, in one step."""
    base, (embedding, head) = golden(family).folder, TABLES[family]
    names = modules_of(family if family in FAMILIES else "llama")
    wholes = ((embedding, head), (head,), ())
    adapters = [
        write_lora(tmp_path / f"a{n}", base, names, seed=n, whole=whole, rank_pattern={"x": 3})
        for n, whole in enumerate(wholes)
    ]
    model = load(base, Space(slots=3, rank=4, heads=2))
    for number, adapter in enumerate(adapters, start=1):
        model.adapters.keep(number, model.adapters.read(adapter.folder))
        model.adapters.put(number, number)
    texts = [text(5, seed=n) for n in range(4)]
    mixed = schedule(Adapted(model, [2, 0, 1, 3]))
    found = mixed.step([(mixed.sequence(tokens), len(tokens)) for tokens in texts])
    for tokens, slot, own in zip(texts, [2, 0, 1, 3], found, strict=True):
        folder = merge(base, adapters[slot - 1], tmp_path / f"m{slot}") if slot else base
        alone = schedule(load(folder))
        (expected,) = alone.step([(alone.sequence(tokens), len(tokens))])
        torch.testing.assert_close(own, expected, rtol=0, atol=TOLERANCE)
    # The next adapter of a slot finds nothing of the one before.
    model.adapters.put(1, 3)
    found, expected = (logprobs(model, schedule, texts[0], slot) for slot in (1, 3))
    assert torch.equal(found, expected)


def test_heads_are_refused_by_what_is_wrong_with_them(golden, tmp_path):
    base = golden("llama").folder
    model = load(base, Space(1, 4, heads=1))
    lora = write_lora(
        tmp_path / "a", base, modules_of("llama"), whole=("lm_head",), rank_pattern={"x": 3}
    )
    with pytest.raises(ModelError, match=r"modules_to_save is .*no room.*--max-adapter-heads"):
        load(base, Space(1, 4)).adapters.read(lora.folder)
    tensors = load_file(lora.folder / "adapter_model.safetensors")
    whole = tensors["base_model.model.lm_head.weight"]

    def changed(**more):
        kept = {name: each for name, each in tensors.items() if each is not whole}
        save_file(kept | more, lora.folder / "adapter_model.safetensors")
        return model.adapters.read(lora.folder)

    with pytest.raises(ModelError, match=r"lm_head.weight is \[3, .*; the base's is"):
        changed(**{"base_model.model.lm_head.weight": whole[:3].clone()})
    with pytest.raises(ModelError, match=r"model.norm.weight: no product"):
        changed(**{"base_model.model.model.norm.weight": torch.ones(3)})


def test_slots_take_what_is_counted_beforehand(golden):
    base = golden("gpt-neox").folder
    model = load(base, Space(slots=3, rank=8, heads=2))
    layout = read_layout(base, None, MAX_POSITIONS)
    numbers = 3 * slot_numbers(layout.weights, WHOLE, 8)
    numbers += 2 * copied_numbers(layout.weights, WHOLE)
    numbers += scale_bytes(*scale_numbers(layout.weights, WHOLE), 3) // 4
    assert model.adapters.nbytes == 4 * numbers


def logprobs(model, schedule, tokens, slot):
    scheduler = schedule(Adapted(model, [slot]))
    return scheduler.step([(scheduler.sequence(tokens), len(tokens))])[0]


def put(model, folder, number=1, slot=1):
    model.adapters.keep(number, model.adapters.read(folder))
    model.adapters.put(slot, number)


def test_scales_follow_the_config(golden, schedule, text, tmp_path):
    """Alphas by pattern, and rank-stabilised ones (Kalajdzievski 2023)."""
    base = golden("llama").folder
    modules = {f"model.layers.1.{name}": 4 for name in (ATTENTION[0], GATED[2])}
    lora = write_lora(
        tmp_path / "a",
        base,
        modules,
        scales={"q_proj": 10 / 4**0.5, "down_proj": 6 / 4**0.5},
        lora_alpha=6,
        use_rslora=True,
        alpha_pattern={r"layers\.\d\.self_attn.*": 10, "own_proj": 99},
    )
    model = load(base, Space(1, 8))
    put(model, lora.folder)
    expected = schedule(load(merge(base, lora, tmp_path / "m")))
    (wanted,) = expected.step([(expected.sequence(text(6)), 6)])
    torch.testing.assert_close(
        logprobs(model, schedule, text(6), 1), wanted, rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("family", ["gpt-neox", "opt-350m"])
def test_biases_take_the_place_of_the_bases(family, golden, schedule, text, tmp_path):
    base, modules = golden(family).folder, modules_of(family)
    lora = write_lora(
        tmp_path / "a", base, modules, biases=tuple(modules), bias="all", rank_pattern={"x": 3}
    )
    model = load(base, Space(1, 4))
    put(model, lora.folder)
    expected = schedule(load(merge(base, lora, tmp_path / "m")))
    (wanted,) = expected.step([(expected.sequence(text(6)), 6)])
    torch.testing.assert_close(
        logprobs(model, schedule, text(6), 1), wanted, rtol=0, atol=TOLERANCE
    )


def test_an_adapter_comes_in_pieces(golden, schedule, text, tmp_path, monkeypatch):
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, modules_of("llama"), rank_pattern={"x": 3})
    whole, model = load(base, Space(1, 8)), load(base, Space(1, 8))
    put(whole, lora.folder)
    monkeypatch.setattr(store, "_PIECE_BYTES", 4096)
    put(model, lora.folder)
    (one,), pieces = whole.adapters._read[1].pieces, model.adapters._read[1].pieces
    assert len(pieces) > 2
    assert torch.equal(torch.cat(pieces), one)
    assert torch.equal(model.adapters._slots, whole.adapters._slots)


def test_a_slot_forgets_what_was_there(golden, schedule, text, tmp_path):
    base = golden("llama").folder
    large = write_lora(tmp_path / "l", base, modules_of("llama", 8), r=8, rank_pattern={"x": 7})
    small = write_lora(tmp_path / "s", base, {"model.layers.0.mlp.up_proj": 2}, seed=3, r=2)
    model, fresh = load(base, Space(1, 8)), load(base, Space(1, 8))
    put(model, large.folder)
    put(model, small.folder, number=2)
    put(fresh, small.folder)
    wanted = logprobs(fresh, schedule, text(5), 1)
    assert torch.equal(logprobs(model, schedule, text(5), 1), wanted)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_products_in_fewer_bits_are_adapted_too(quantize, golden, schedule, text, tmp_path):
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, modules_of("llama"), rank_pattern={"x": 3})
    model = load_model(
        base,
        dtype=None,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
        quantize=quantize,
        adapters=Space(1, 4),
    )
    put(model, lora.folder)
    plain = logprobs(model, schedule, text(6), 0)
    adapted = logprobs(model, schedule, text(6), 1)
    merged = load(merge(base, lora, tmp_path / "m"))
    expected = schedule(merged)
    (wanted,) = expected.step([(expected.sequence(text(6)), 6)])
    # Rounding moves both alike.
    assert (adapted - wanted).abs().mean() < 0.2 * (plain - wanted).abs().mean()


@pytest.mark.parametrize("family", ["llama-grouped-tied", "gpt-neox", "bloom", "phi3"])
def test_what_ranks_add_together_is_what_one_adds(family, golden, tmp_path):
    """Outputs that ranks divide lie beside each other; of inputs they divide each has a summand."""
    base = golden(family).folder
    name = family if family in FAMILIES else "llama"
    lora = write_lora(tmp_path / "a", base, modules_of(name), rank_pattern={"x": 3})
    world = 2
    whole, *ranks = (_store(base, shard, lora) for shard in (WHOLE, Shard(0, 2), Shard(1, 2)))
    targets = whole._base.targets
    divided = {p.weight: p.source for places in targets.places.values() for p in places}
    for product, weights in whole._weights.items():
        x = torch.randn(3, weights.down.shape[3], generator=torch.Generator().manual_seed(1))
        expected = _delta(whole, product, x)
        inputs = divided[product].axes[1].division is not Division.WHOLE
        own = x.chunk(world, dim=-1) if inputs else [x] * world
        found = [_delta(store, product, part) for store, part in zip(ranks, own, strict=True)]
        if inputs:
            together = sum(found)
        else:
            own_rows = ranks[0]._weights[product].rows
            split = [part.split(own_rows, -1) for part in found]
            parts = [torch.cat(each, -1) for each in zip(*split, strict=True)]
            together = _once(parts, weights.rows)
        torch.testing.assert_close(together, expected, rtol=0, atol=1e-5)


def _once(parts, rows):
    """Of parts that every rank has whole (heads that are fewer than ranks), one."""
    return torch.cat([part[:, :n] for part, n in zip(parts, rows, strict=True)], -1)


def _store(base, shard, lora):
    from tokenpod.kernels.backends import reference
    from tokenpod.models.adapters.store import store_of
    from tokenpod.models.adapters.targets import targets_of
    from tokenpod.models.adapters.virtual import VirtualBase
    from tokenpod.models.folder import describe

    read = describe(base, MAX_POSITIONS, None)
    family, spec = read.family, read.spec
    layout = read_layout(base, None, MAX_POSITIONS)
    tensors = {"embedding": torch.zeros(1)}
    for weight in layout.weights:
        rows = sum(shard.length(source.axes[0]) for source in weight.sources)
        if weight.name.endswith("_bias"):
            tensors[weight.name] = torch.zeros(rows)
        elif weight.multiplied:
            tensors[weight.name] = torch.zeros(rows, shard.length(weight.sources[0].axes[1]))
    virtual = VirtualBase(spec, shard, torch.float32, MAX_POSITIONS)
    operations = reference.OPERATIONS
    store = store_of(
        targets_of(family, spec), layout.weights, tensors, Space(1, 8), virtual, operations
    )
    store.keep(1, store.read(lora.folder))
    store.put(1, 1)
    return store


def _delta(store, product, x):
    from tokenpod.kernels.adapters.reference_adapters import adapt, plan_adapters

    plan = plan_adapters(torch.ones(len(x), dtype=torch.int64), store._ranks)
    y = x.new_zeros(len(x), sum(store._weights[product].rows))
    adapt(x, y, store._weights[product], plan)
    return y


REFUSED = {
    "another family": ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "residual base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "more layers": ({"layer_replication": [[0, 1]]}, "layer_replication is"),
    "biases of factors": ({"lora_bias": True}, "lora_bias is True"),
    "invocation": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
    "a field of tomorrow": ({"use_tomorrow": 3}, "use_tomorrow is 3"),
    "an endless pattern": ({"alpha_pattern": {"(a+)+(b+)+$": 3}}, "at most"),
    "a broken pattern": ({"alpha_pattern": {"(": 3}}, "no regular expression"),
    "no alpha": ({"lora_alpha": -1}, "lora_alpha is -1"),
    "another rank": ({"r": 5}, "has rank 4; r is 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_is_not_understood_is_refused_by_the_field(case, golden, tmp_path):
    config, said = REFUSED[case]
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {"model.layers.0.mlp.up_proj": 4}, **config)
    with pytest.raises(ModelError, match=rf"adapter_config.json: .*{said}".replace("(", r"\(")):
        load(base, Space(1, 8)).adapters.read(lora.folder)


def tensors_of(folder):
    return load_file(folder / "adapter_model.safetensors")


def changed(lora, **tensors):
    """The adapter with other tensors, those that are None left out."""
    found = {name.removeprefix("base_model.model."): t for name, t in tensors_of(lora).items()}
    found |= tensors
    save_file(
        {f"base_model.model.{n}": t for n, t in found.items() if t is not None},
        lora / "adapter_model.safetensors",
    )


UP = "model.layers.0.mlp.up_proj"
FOREIGN = {
    "another width": ({f"{UP}.lora_A.weight": torch.zeros(4, 7)}, "inputs and"),
    "another rank of B": ({f"{UP}.lora_B.weight": torch.zeros(96, 3)}, "lora_A"),
    "no B": ({f"{UP}.lora_B.weight": None}, "a lora_A and no lora_B"),
    "no such module": ({"model.layers.0.mlp.side.lora_A.weight": torch.zeros(4, 4)}, "no module"),
    "the head": ({"lm_head.lora_A.weight": torch.zeros(4, 4)}, "there is no room for LoRA"),
    "a norm": ({"model.norm.weight": torch.zeros(4)}, "no product that can be adapted"),
    "a vector": ({f"{UP}.lora_magnitude_vector": torch.zeros(4)}, "lora_magnitude_vector"),
    "whole numbers": ({f"{UP}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int32)}, "I32"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_adapter_of_another_base_is_refused(case, golden, tmp_path):
    tensors, said = FOREIGN[case]
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {UP: 4})
    width = tensors_of(lora.folder)[f"base_model.model.{UP}.lora_A.weight"].shape[1]
    if case == "whole numbers":
        tensors = {f"{UP}.lora_A.weight": torch.zeros(4, width, dtype=torch.int32)}
    changed(lora.folder, **tensors)
    with pytest.raises(ModelError, match=rf"adapter_model.safetensors: .*{said}"):
        load(base, Space(1, 8)).adapters.read(lora.folder)


def test_experts_are_refused_by_name(golden, tmp_path):
    base = golden("mixtral").folder
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    lora = write_lora(tmp_path / "a", base, {"model.layers.0.self_attn.q_proj": 4})
    changed(lora.folder, **{f"{name}.lora_A.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=rf"{name}.*experts are adapted only"):
        load(base, Space(1, 8)).adapters.read(lora.folder)


def test_products_that_a_config_multiplies_are_refused_by_name(golden, tmp_path):
    base, name = golden("falcon-h1-varied").folder, "model.layers.0.self_attn.o_proj"
    lora = write_lora(tmp_path / "a", base, {name: 4})
    with pytest.raises(ModelError, match=rf"{name}.*multiplied as config.json says"):
        load(base, Space(1, 8)).adapters.read(lora.folder)


def test_a_rank_above_the_slots_is_refused_by_the_flag(golden, tmp_path):
    base = golden("llama").folder
    lora = write_lora(tmp_path / "a", base, {UP: 4})
    with pytest.raises(ModelError, match=r"rank 4; at most 2 is served .--max-adapter-rank."):
        load(base, Space(1, 2)).adapters.read(lora.folder)


def test_files_that_are_not_there_or_cut_are_named(golden, tmp_path):
    base = golden("llama").folder
    store = load(base, Space(1, 8)).adapters
    with pytest.raises(ModelError, match=r"there is no adapter_config.json"):
        store.read(tmp_path)
    lora = write_lora(tmp_path / "a", base, {UP: 4})
    weights = lora.folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        store.read(lora.folder)
    weights.rename(lora.folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no adapter_model.safetensors; adapter_model.bin is not"):
        store.read(lora.folder)


def test_another_content_has_another_digest(golden, tmp_path):
    base = golden("llama").folder
    store = load(base, Space(1, 8)).adapters
    lora = write_lora(tmp_path / "a", base, {UP: 4})
    before = store.read(lora.folder).digest
    config = lora.folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    after = store.read(lora.folder).digest
    assert after != before
    files = ("adapter_config.json", "adapter_model.safetensors")
    own = [sha256((lora.folder / name).read_bytes()).digest() for name in files]
    assert after == sha256(b"".join(own)).hexdigest()
