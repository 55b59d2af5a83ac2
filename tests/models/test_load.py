"""Loading a folder: every layout that there is, and one clear line for every fault."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.kernels.layouts import alike
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config, read_layout
from tokenpod.models.load import load_model
from tokenpod.models.specs.kv_scales import read_scales
from tokenpod.models.specs.layer_spec import Experts
from tokenpod.models.weights.shard import Shard

CPU = torch.device("cpu")


@pytest.fixture
def folder(golden, tmp_path) -> Path:
    """A copy of a sound checkpoint, to be damaged."""
    target = tmp_path / "model"
    shutil.copytree(golden("llama").folder, target)
    return target


def load(folder: Path, dtype: torch.dtype | None = None, **more: Any):
    return load_model(folder, dtype=dtype, device=CPU, progress=lambda done, total: None, **more)


def change_config(folder: Path, *, drop: tuple[str, ...] = (), **values) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def logprobs(model, schedule, tokens):
    scheduler = schedule(model)
    return scheduler.step([(scheduler.sequence(tokens), len(tokens))])[0]


def test_shards_are_read_like_a_single_file(golden, tmp_path, load_folder, schedule, text):
    whole = golden("qwen3")
    whole.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tokens = text(20)
    one, many = (
        logprobs(load_folder(folder), schedule, tokens) for folder in (whole.folder, tmp_path)
    )
    assert torch.equal(one, many)


def test_a_head_that_is_absent_is_the_embedding(folder, schedule, text):
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    absent = load(folder)
    assert absent.config.head.tied

    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, tie)
    equal = load(folder)
    assert not equal.config.head.tied
    tokens = text(9)
    assert torch.equal(logprobs(absent, schedule, tokens), logprobs(equal, schedule, tokens))


@pytest.mark.parametrize("name", ["llama-llama3", "llama-linear", "mistral-window"])
def test_configs_of_older_transformers_say_the_same(name, golden, tmp_path):
    new = golden(name)
    shutil.copytree(new.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    old = {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    if scaling["rope_type"] != "default":
        old["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    (tmp_path / "config.json").write_text(json.dumps(config | old))
    assert read_config(tmp_path) == read_config(new.folder)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_checkpoints_unless_asked(name, folder):
    change_config(folder, dtype=name)
    assert load(folder).dtype == getattr(torch, name)
    assert load(folder, dtype=torch.float32).dtype == torch.float32


def test_a_model_knows_its_size(golden, folder):
    model = load(folder)
    expected = sum(parameter.numel() for parameter in golden("llama").model.parameters())
    assert model.parameters_count == expected
    assert model.weight_bytes == 4 * expected


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_progress_goes_from_nothing_to_all_bytes(folder, quantize):
    heard: list[tuple[int, int]] = []
    load_model(
        folder,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: heard.append((done, total)),
        quantize=quantize,
    )
    done = [done for done, _ in heard]
    assert done[0] == 0
    assert done == sorted(done)
    assert heard[-1][0] == heard[-1][1] == load(folder).weight_bytes
    assert len(heard) > 10


def test_end_of_text_tokens_come_from_the_generation_config_first(folder):
    change_config(folder, eos_token_id=5)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_config(folder).eos_token_ids == {5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert read_config(folder).eos_token_ids == {6, 7}
    (folder / "generation_config.json").write_text("{}")
    assert read_config(folder).eos_token_ids == {5}
    change_config(folder, eos_token_id=[5, -1, 96])  # of a vocabulary of 96
    assert read_config(folder).eos_token_ids == {5}


def test_the_window_of_a_model_is_that_of_all_its_layers(golden):
    assert read_config(golden("mistral-window").folder).sliding_window == 7
    assert read_config(golden("mistral").folder).sliding_window is None
    assert read_config(golden("qwen2-window").folder).kv_windows == (None, 9, 9)
    assert read_config(golden("qwen2-window").folder).sliding_window is None


def test_frequencies_of_old_checkpoints_are_skipped(folder):
    change_tensors(
        folder,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    load(folder)


def test_a_folder_that_is_not_there(tmp_path):
    refused(tmp_path / "nowhere", "nowhere/config.json: no such file")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '"text"', "\xff"])
def test_a_config_that_is_no_json_object(folder, content):
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused(folder, "config.json: (not valid JSON|expected a JSON object)")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "architectures",
            ["BertLMHeadModel"],
            "BertLMHeadModel is not supported: .*`tokenpod models`",
        ),
        ("architectures", [], "architecture none is not supported"),
        ("architectures", 3, "architectures is 3; expected a list"),
        ("hidden_size", "64", "hidden_size is '64'; expected a whole number"),
        ("hidden_size", -1, "hidden_size is -1; expected a whole number from 1"),
        ("hidden_size", 2**40, "hidden_size is 1099511627776; expected"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; expected"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3: 4 query heads can't share 3"),
        ("head_dim", 15, "head_dim is 15; rotation needs an even number"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0; expected a positive"),
        ("hidden_act", "quick_gelu", "hidden_act 'quick_gelu' is not supported"),
        ("dtype", "int8", "dtype 'int8' is not supported"),
        ("eos_token_id", "end", "eos_token_id is 'end'; expected a token id"),
        ("quantization_config", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ("rope_parameters", {"rope_type": "spiral"}, "rope_type 'spiral' is not supported"),
        ("rope_parameters", {"rope_type": "longrope"}, "rope_parameters: short_factor is missing"),
        ("rope_parameters", {"rope_type": "linear"}, "rope_parameters: factor is missing"),
        ("rope_parameters", {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2: of 16"),
        ("rope_parameters", {"full_attention": {}}, "per layer type is not supported"),
        ("rope_parameters", {"rope_theta": float("inf")}, "rope_theta is inf; expected"),
        ("intermediate_size", 100, r"gate_proj.weight has shape \[112, 64\].*says \[100, 64\]"),
        ("num_hidden_layers", 2, "has no tensor model.layers.2.*and 6 more"),
        (
            "num_hidden_layers",
            4,
            r"tensors model.layers.3.input_layernorm.weight, .*6 more\) are missing",
        ),
        ("attention_bias", True, r"layers.0.self_attn.k_proj.bias, .* \(and 9 more\) are missing"),
    ],
)
def test_a_config_that_does_not_fit(folder, field, value, message):
    change_config(folder, **{field: value})
    refused(folder, message)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("mixtral", "num_local_experts", 0, "num_local_experts is 0; expected .* 1 to 1,024"),
        ("mixtral", "num_local_experts", 10**9, "num_local_experts is 1000000000; expected"),
        ("mixtral", "num_experts_per_tok", 6, "num_experts_per_tok is 6; expected .* 1 to 5"),
        ("mixtral", "num_local_experts", 6, r"gate.weight has shape \[5, 64\].*says \[6, 64\]"),
        ("mixtral", "num_local_experts", 4, r"gate.weight has shape \[5, 64\].*says \[4, 64\]"),
        ("qwen3-moe", "moe_intermediate_size", 41, r"has shape \[40, 64\].*says \[41, 64\]"),
        ("qwen3-moe", "mlp_only_layers", [-1], r"mlp_only_layers is \[-1\]; expected a list"),
        ("qwen3-moe", "mlp_only_layers", [True], r"mlp_only_layers is \[True\]; expected a list"),
        ("qwen3-moe", "mlp_only_layers", [1], "layers.1.mlp.gate_proj.weight, .* are missing"),
        ("qwen3-moe", "decoder_sparse_step", 0, "decoder_sparse_step is 0; expected"),
    ],
)
def test_experts_that_do_not_fit(golden, tmp_path, name, field, value, message):
    shutil.copytree(golden(name).folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **{field: value})
    refused(tmp_path, message)


def test_the_number_of_experts_has_an_older_name(golden, tmp_path):
    new = golden("qwen3-moe").folder
    shutil.copytree(new, tmp_path, dirs_exist_ok=True)
    config = json.loads((new / "config.json").read_text())
    count = config.pop("num_local_experts", None) or config.pop("num_experts")
    for name in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps(config | {name: count}))
        assert read_config(tmp_path) == read_config(new)
        assert read_config(tmp_path).layers[0].mlp.count == 8


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"decoder_sparse_step": 9}, set()),
        ({"mlp_only_layers": [0, 4, 7]}, {1, 2, 3}),
    ],
)
def test_which_layers_have_experts(golden, tmp_path, settings, layers):
    shutil.copytree(golden("qwen3-moe").folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, num_hidden_layers=5, **settings)
    spec = read_config(tmp_path)
    assert {i for i in range(5) if isinstance(spec.layers[i].mlp, Experts)} == layers


def test_a_config_without_a_field_that_matters(folder):
    change_config(folder, drop=("vocab_size",))
    refused(folder, "config.json: vocab_size is missing")


def test_a_longer_sequence_than_the_models_context_is_refused(folder):
    context = read_config(folder).max_positions
    load(folder, max_total_tokens=context)
    with pytest.raises(ModelError, match=f"--max-total-tokens is {context + 1}: the model's"):
        load(folder, max_total_tokens=context + 1)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor .*; `tokenpod convert .*` makes them of")


def test_a_gguf_file_instead_of_weights_is_told_how_to_be_converted(folder):
    (folder / "model.safetensors").rename(folder / "some.gguf")
    refused(folder, r"`tokenpod convert .*/some\.gguf .*-safetensors` makes them of some\.gguf")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_that_are_cut_short(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors: not a whole safetensors file")


def test_a_tensor_too_many(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.extra": torch.ones(2)}))
    refused(folder, "LlamaForCausalLM has no tensor model.extra")


def test_a_tensor_of_integers(folder):
    def quantise(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    change_tensors(folder, quantise)
    refused(folder, "model.norm.weight holds I8 numbers")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", ".."])
def test_an_index_that_points_elsewhere(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "is not the name of a file beside it")


def test_an_index_that_names_a_missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model-1.safetensors: no such file")


def test_too_little_memory_is_said_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(loading, "available_bytes", lambda device: 1000)
    refused(folder, re.escape("the weights need 0.00 GB as float32; 0.00 GB of memory are"))


def add_scales(folder, **changes):
    """A scale of keys for all heads of each layer, and one of values for each head."""

    def change(tensors):
        for i in range(3):
            tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor(0.5 + i)
            tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor([0.25, 0.5, 1.0, 2.0]) + i
        for name, value in changes.items():
            tensors[f"model.layers.1.self_attn.{name}"] = value
            if value is None:
                del tensors[f"model.layers.1.self_attn.{name}"]

    change_tensors(folder, change)


def test_scales_of_keys_and_values_are_read(folder):
    assert load(folder).kv_scales is None
    add_scales(folder)
    change_config(
        folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": {}}
    )
    scales = load(folder).kv_scales
    assert [x.keys.tolist() for x in scales] == [[0.5] * 4, [1.5] * 4, [2.5] * 4]
    assert scales[1].values.tolist() == [1.25, 1.5, 2.0, 3.0]


def test_a_rank_reads_the_scales_of_its_heads(folder):
    add_scales(folder)
    with Checkpoint(folder) as checkpoint:
        layout = read_layout(folder, checkpoint)
        scales = read_scales(checkpoint, layout.scales, [alike(4, 8)] * 3, Shard(1, 2), CPU)
    assert [x.values.tolist() for x in scales] == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_scale": None}, r"tensor model.layers.1.self_attn.v_scale is missing"),
        ({"k_scale": torch.ones(3)}, r"k_scale has shape \[3\]; .* one for each of 4 heads"),
        ({"k_scale": torch.tensor(0.0)}, "is no positive number"),
        ({"v_scale": torch.tensor(float("nan"))}, "is no positive number"),
    ],
    ids=str,
)
def test_scales_that_can_not_be_are_refused(folder, changes, message):
    add_scales(folder, **changes)
    refused(folder, message)


def test_a_checkpoint_that_does_not_say_how_weights_are_quantised_is_refused(folder):
    groups = {"group_0": {"targets": ["Linear"]}}
    change_config(
        folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups}
    )
    refused(folder, "quantization_config: format is missing")


def test_long_factors_are_for_servers_of_long_texts(golden, tmp_path):
    """Once for all texts: keys that are cached must not change."""
    shutil.copytree(golden("phi3-short").folder, tmp_path, dirs_exist_ok=True)
    short, long = (read_config(tmp_path, limit) for limit in (256, 257))
    assert read_config(tmp_path) == long
    for spec, variant, factors in ((short, "short", [1.0, 1.7]), (long, "long", [2.0, 9.0])):
        assert spec.rope_variant == f"longrope, {variant} factors"
        rope = spec.layers[0].mixer.positions
        plain = [1.0, 10000.0**-0.75]
        found = [rope.inverse_frequencies[i] for i in (0, 3)]
        assert found == pytest.approx([x / f for x, f in zip(plain, factors, strict=True)])


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("opt", "hidden_size", 62, "num_attention_heads is 4: hidden_size 62 can't be divided"),
        ("opt", "activation_function", "selu", "activation_function 'selu' is not supported"),
        ("gpt-neox", "layer_norm_eps", -1, "layer_norm_eps is -1; expected a positive"),
        ("gemma2", "hidden_activation", "tanh", "hidden_activation 'tanh' is not supported"),
        ("gemma2", "attn_logit_softcapping", 0, "attn_logit_softcapping is 0; expected a pos"),
        ("gemma2", "layer_types", ["full_attention"], "layer_types must name full_attention"),
        ("falcon-40b", "num_kv_heads", 3, "num_kv_heads is 3: 4 query heads can't share 3"),
        ("falcon-40b", "num_ln_in_parallel_attn", 3, "num_ln_in_parallel_attn is 3; expected"),
        ("falcon-40b", "num_kv_heads", 4, r"query_key_value.weight has shape \[128, 64\]"),
        ("bloom", "n_head", 5, "n_head is 5: hidden_size 64 can't be divided among 5 heads"),
        (
            "bloom",
            "apply_residual_connection_post_layernorm",
            True,
            "apply_residual_connection_post_layernorm is true; only false",
        ),
        ("phi3-short", "rope_parameters", {"rope_type": "longrope"}, "_factor is missing"),
    ],
)
def test_a_config_of_another_family_that_does_not_fit(
    golden, tmp_path, name, field, value, message
):
    shutil.copytree(golden(name).folder, tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, **{field: value})
    refused(tmp_path, message)


def test_a_checkpoint_without_the_familys_prefix(golden, tmp_path, load_folder, schedule, text):
    """BLOOM's own are published like that."""
    whole = golden("bloom")
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(tmp_path, rename)
    tokens = text(9)
    one, other = (
        logprobs(load_folder(folder), schedule, tokens) for folder in (whole.folder, tmp_path)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("family", "device", "dtype", "world", "problem"),
    [
        ("llama", "cuda", torch.bfloat16, 1, None),
        ("gemma3", "cuda", torch.float16, 1, None),
        ("llama", "cpu", torch.bfloat16, 1, "on a device of type cpu, and not on a GPU"),
        ("llama", "cuda", torch.float32, 1, "is computed in float32"),
        ("llama", "cuda", torch.bfloat16, 2, "is divided between 2 ranks"),
        ("mixtral", "cuda", torch.bfloat16, 1, "has mixtures of experts"),
        ("qwen3-5", "cuda", torch.bfloat16, 1, "are not plain attention"),
    ],
)
def test_deterministic_refuses_what_it_can_not_promise(
    family, device, dtype, world, problem, golden
):
    with Checkpoint(golden(family).folder) as checkpoint:
        layout = read_layout(golden(family).folder, checkpoint)
    how = (dtype, torch.device(device), Shard(0, world), None)
    if problem is None:
        loading.check_deterministic(layout, *how)
        return
    with pytest.raises(ModelError, match=f"^deterministic: .*{problem}"):
        loading.check_deterministic(layout, *how)


def test_deterministic_is_refused_before_weights_are_read(golden):
    with pytest.raises(ModelError, match=r"^deterministic: LlamaForCausalLM runs on a device of"):
        load(golden("llama").folder, deterministic=True)
