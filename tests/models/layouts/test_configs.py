"""What configs of quantised checkpoints say: which modules, and what is refused, by its field."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import packers
from support.checkpoints.published import CONFIG, CPU, dense_of, make_pair, read
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Number
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.footprint import footprint_of
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        }
    },
}
gptq = partial(packers.gptq, group=64)
awq = partial(packers.awq, group=64)
static = partial(packers.floats, scalar=True, static=True)


def same(pair, shard=Shard()):  # noqa: B008 - it is frozen
    packed, dense = read(pair.packed, shard), read(pair.dense, shard)
    for key, weight in packed.items():
        torch.testing.assert_close(dense_of(weight), dense[key], rtol=1e-6, atol=1e-7, msg=key)
    return packed


def refused(folder, message, **more):
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None, **more)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "module", "left"),
    [
        (INT8 | {"ignore": ["re:.*self_attn.*", "lm_head"]}, packers.signed, "self_attn"),
        (INT8 | {"ignore": ["model.layers.0.mlp.up_proj"]}, packers.signed, "up_proj"),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.mlp"]}, packers.floats, "mlp"),
        (AWQ | {"modules_to_not_convert": ["k_proj"]}, awq, "k_proj"),
        (GPTQ | {"dynamic": {"-:.*v_proj": {}}}, gptq, "v_proj"),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, gptq, r"self_attn|gate|down"),
    ],
)
def test_modules_that_a_config_leaves_out_stay_dense(config, module, left, tmp_path):
    pair = make_pair(tmp_path, config, module, left=lambda name: re.search(left, name) is not None)
    packed = same(pair)
    products = [packed[f"0.{name}"] for name in ("qkv", "output", "up", "down")]
    kinds = {type(part) for weight in products for part in getattr(weight, "parts", (weight,))}
    assert torch.Tensor in kinds
    assert len(kinds) == 2
    # Without its tensors, the config says which they are.
    whole = read_layout(pair.packed, None)
    assert whole.reader is not None
    assert not all(whole.reader.quantises(weight) for weight in whole.weights)


def test_modules_may_differ(tmp_path):
    """GPTQModel's rules: another number of bits where a pattern matches."""

    def module(source, outputs, inputs):
        return packers.gptq(source, outputs, inputs, bits=8 if outputs == 384 else 4, group=64)

    config = GPTQ | {"dynamic": {r"+:.*\.(gate|up)_proj": {"bits": 8}}}
    # The whole of `gate_proj` is found by its pattern, and nothing ends in `gate`.
    packed = same(make_pair(tmp_path, config, module))
    assert isinstance(packed["0.down"].parts[0], Int4Weight)
    assert not isinstance(packed["0.up"].parts[0], Int4Weight)


def test_groups_of_a_config_have_formats_of_their_own(tmp_path):
    def module(source, outputs, inputs):
        made = packers.signed if inputs == 384 else partial(packers.floats, block=(1, None))
        return made(source, outputs, inputs)

    groups = {
        "group_0": {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
        "group_1": {
            "targets": ["re:.*down_proj$"],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        },
    }
    config = INT8 | {"config_groups": groups, "format": "mixed-precision"}
    packed = same(make_pair(tmp_path, config, module))
    assert [type(packed[f"0.{name}"].parts[0]) for name in ("up", "down")] == [
        Fp8Weight,
        Int8Weight,
    ]


@pytest.mark.parametrize(
    ("file", "content", "module"),
    [
        ("hf_quant_config.json", MODELOPT, static),
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False}, gptq),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, awq),
    ],
)
def test_older_tools_say_it_in_a_file_beside(file, content, module, tmp_path):
    same(make_pair(tmp_path, None, module, files={file: content}))


def test_a_static_scale_of_fused_inputs_is_the_largest(tmp_path):
    pair = make_pair(tmp_path, None, static, files={"hf_quant_config.json": MODELOPT})
    stored = load_file(pair.packed / "model.safetensors")
    (qkv,) = read(pair.packed, Shard())["0.qkv"].parts
    assert qkv.rounding is not None
    assert qkv.rounding.number is Number.FP8
    scales = [stored[f"model.layers.0.self_attn.{x}_proj.input_scale"] for x in "qkv"]
    assert qkv.rounding.static == max(scales)


def test_scales_of_keys_and_values_lie_where_modelopt_has_them(tmp_path):
    kv = MODELOPT | {"quantization": MODELOPT["quantization"] | {"kv_cache_quant_algo": "FP8"}}
    pair = make_pair(tmp_path, None, static, files={"hf_quant_config.json": kv})
    at = "model.layers.0.self_attn"
    scales = {f"{at}.k_proj.k_scale": torch.tensor(0.5), f"{at}.v_proj.v_scale": torch.tensor(2.0)}
    damaged(pair, **scales)
    model = load_model(pair.packed, dtype=None, device=CPU, progress=lambda done, total: None)
    assert model.kv_scales is not None
    assert all((layer.keys == 0.5).all() for layer in model.kv_scales)
    assert all((layer.values == 2.0).all() for layer in model.kv_scales)


def test_biases_that_are_zero_and_belong_to_nothing_are_left(tmp_path):
    """AutoGPTQ wrote one for every module, whatever the model has."""
    pair = make_pair(tmp_path, GPTQ, gptq)
    name = "model.layers.0.mlp.down_proj.bias"
    damaged(pair, **{name: torch.zeros(192)})
    same(pair)
    damaged(pair, **{name: torch.full((192,), 0.5)})
    refused(pair.packed, re.escape(f"{name} is not zero, and LlamaForCausalLM has no such bias"))


def test_fused_modules_are_read_in_parts(tmp_path):
    config = INT8 | {"ignore": ["lm_head"]}
    pair = make_pair(tmp_path, config, packers.signed, architectures=["Phi3ForCausalLM"])
    for shard in (Shard(), Shard(1, 2), Shard(3, 4)):
        same(pair, shard)


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    # On two ranks 96, on four 48: inside a block of 128.
    "moe_intermediate_size": 192,
    "head_dim": 24,
    "norm_topk_prob": True,
}


def test_experts_of_unlike_formats_become_dense_and_routers_stay(tmp_path):
    """They are one product here."""
    ignored = "model.layers.0.mlp.experts.1.up_proj"
    config = INT8 | {"ignore": ["lm_head", "model.layers.0.mlp.gate", ignored]}
    pair = make_pair(tmp_path, config, packers.signed, left=ignored.__eq__, **MIXTURE)
    for shard in (Shard(), Shard(1, 2), Shard(3, 4)):
        packed = same(pair, shard)
    assert isinstance(packed["0.experts.gate_up"], torch.Tensor)
    assert isinstance(packed["0.experts.down"], StackedWeight)


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
}


def test_latent_rows_in_blocks_whose_heads_are_turned(tmp_path):
    """Rows of a head are in another order here, across blocks; one weight becomes dense."""
    block = partial(packers.floats, block=(64, 64), scales=".weight_scale_inv")
    pair = make_pair(tmp_path, FP8 | {"weight_block_size": [64, 64]}, block, **LATENT)
    for shard in (Shard(), Shard(1, 2)):
        packed = same(pair, shard)
    assert isinstance(packed["0.kv_up"], torch.Tensor)
    assert isinstance(packed["0.latent_in"].parts[0], Fp8Weight)


def test_size_counts_what_is_held(tmp_path):
    pair = make_pair(tmp_path, GPTQ, gptq)
    weights = read(pair.packed, Shard(1, 2))
    held = sum(weight.nbytes for weight in weights.values())
    found = footprint_of(pair.packed).weight_bytes(2, 4)
    assert 0.93 * found < held <= found
    (pair.packed / "model.safetensors").unlink()
    assert footprint_of(pair.packed).weight_bytes(2, 4) == found


@pytest.mark.parametrize(
    ("config", "module", "name"),
    [(GPTQ, gptq, "gptq int4"), (FP8, packers.floats, "fp8"), (None, packers.signed, "")],
)
def test_a_model_names_what_its_weights_are_held_in(config, module, name, tmp_path):
    pair = make_pair(tmp_path, config, module)
    folder = pair.packed if config else pair.dense
    model = load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None)
    assert model.quantization == name
    assert footprint_of(folder).quantize == (name or "none")


def group(**changes):
    weights = INT8["config_groups"]["group_0"]["weights"] | changes
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def inputs(**values):
    one = INT8["config_groups"]["group_0"] | {"input_activations": {"num_bits": 8} | values}
    return {"config_groups": {"group_0": one}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "exl2"}, "quant_method 'exl2' is not supported"),
        ({"quant_method": "torchao"}, "quant_method 'torchao' is not supported"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"quant_method": "quanto"}, "quant_method 'quanto' is not supported"),
        (GPTQ | {"bits": 5}, "quantization_config: bits 5 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"dynamic": {"-:*": {}}}, "is no regular expression"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported"),
        (AWQ | {"bits": 8}, "bits 8 is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is"),
        (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"}, "'static' is not"),
        (INT8 | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not"),
        (INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitm"),
        (INT8 | {"transform_config": {"config_groups": {"v": {}}}}, "transform_config is not"),
        (INT8 | group(num_bits=6), "weights: num_bits 6 is not supported"),
        (INT8 | group(strategy="tensor_group"), "weights: strategy 'tensor_group' is not"),
        (INT8 | group(type="complex"), "weights: type 'complex' is not supported"),
        (INT8 | inputs(dynamic=True, symmetric=False), "symmetric False is not supported"),
        (INT8 | inputs(num_bits=4, dynamic=True), "input_activations: num_bits 4 is not"),
        (INT8 | {"format": "pack-quantized"} | inputs(), "input_activations: not supported with"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' is not"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is False and load_in_8bit is False"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "quant_storage 'bfloat16'"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_field(config, message, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    text = json.dumps(CONFIG | {"quantization_config": config})
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        read_layout(folder, None)
    assert "\n" not in str(caught.value)


def damaged(pair, **tensors):
    path = pair.packed / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def test_tensors_that_contradict_the_config_are_refused(tmp_path):
    pair = make_pair(tmp_path, GPTQ, gptq)
    down = "model.layers.0.mlp.down_proj"
    damaged(pair, **{f"{down}.g_idx": torch.full((384,), 6, dtype=torch.int32)})
    refused(pair.packed, f"{down}.g_idx names group 6")
    damaged(pair, **{f"{down}.g_idx": torch.zeros(384, dtype=torch.int64)})
    refused(pair.packed, f"{down}.g_idx holds I64 numbers")
    damaged(pair, **{f"{down}.scales": torch.zeros(3, 192)})
    refused(pair.packed, re.escape(f"{down}.scales has shape [3, 192]"))


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    pair = make_pair(tmp_path, FP8, packers.floats)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    damaged(pair, **{name: torch.tensor([float("nan")])})
    refused(pair.packed, f"{name} holds a scale that is no positive number")


def test_dense_weights_under_a_strict_config_are_refused(tmp_path):
    left = partial(re.search, "up_proj")
    pair = make_pair(tmp_path, INT8, packers.signed, left=lambda name: bool(left(name)))
    refused(pair.packed, "up_proj.weight holds F32 numbers")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("gptq", None),
        ("marlin", None),
        ("awq", "quantize is awq: the checkpoint's own quantization_config says gptq"),
        ("int8", "quantize is int8: the checkpoint's own"),
        ("exl2", "quantize is exl2"),
    ],
)
def test_the_operators_word_is_compared_with_the_checkpoint(asked, message, tmp_path):
    pair = make_pair(tmp_path, GPTQ, gptq)
    if message is None:
        read(pair.packed, Shard(), quantize=asked)
    else:
        refused(pair.packed, message, quantize=asked)


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ("eetq", Int8Weight),
        ("bitsandbytes", Int8Weight),
        ("bitsandbytes-nf4", Int4Weight),
        ("bitsandbytes-fp4", Int4Weight),
        ("int4", Int4Weight),
    ],
)
def test_names_of_tgis_launcher_are_made_at_load(asked, held, tmp_path):
    pair = make_pair(tmp_path, None, packers.signed)
    assert type(read(pair.dense, Shard(), quantize=asked)["0.down"].parts[0]) is held
    refused(pair.dense, "quantize is gptq: the checkpoint is not quantised", quantize="gptq")
