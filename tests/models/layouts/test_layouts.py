"""Every layout, whole and divided among ranks: its weights are what its numbers stand for."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import packers
from support.checkpoints.published import CONFIG, CPU, dense_of, make_pair, read
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.models.checkpoints.nested import NESTED
from tokenpod.models.load import load_model
from tokenpod.models.weights.shard import Shard

pytestmark = pytest.mark.compute


def gptq(**more: Any) -> tuple[dict[str, Any], partial]:
    version = more.get("version", 1)
    config = {
        "quant_method": "gptq",
        "bits": more.get("bits", 4),
        "group_size": more.get("group", -1),
        "desc_act": more.get("act_order", False),
        "sym": more.get("symmetric", False),
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return config, partial(packers.gptq, **more)


def tensors_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(**more: Any) -> tuple[dict[str, Any], partial]:
    group = more.get("group")
    weights = {
        "num_bits": more.get("bits", 4),
        "type": "int",
        "symmetric": more.get("symmetric", True),
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": "group" if more.get("act_order") else None,
        "dynamic": False,
    }
    return tensors_config("pack-quantized", weights), partial(packers.packed, **more)


def signed(inputs: dict[str, Any] | None = None, **more: Any) -> tuple[dict[str, Any], partial]:
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": more.get("symmetric", True),
        "strategy": more.get("strategy", "channel"),
        "group_size": more.get("group"),
    }
    return tensors_config("int-quantized", weights, inputs), partial(packers.signed, **more)


def floats(inputs: dict[str, Any] | None = None, **more: Any) -> tuple[dict[str, Any], partial]:
    block = more.get("block", (None, None))
    strategy = "tensor" if block == (None, None) else "channel" if block[1] is None else "block"
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "block_structure": list(block) if strategy == "block" else None,
    }
    return tensors_config("float-quantized", weights, inputs), partial(packers.floats, **more)


def float4(kind: str, strategy: str, group: int) -> tuple[dict[str, Any], partial]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
    }
    inputs = weights | {"dynamic": "local"} if kind == "nvfp4" else None
    config = tensors_config(f"{kind}-pack-quantized", weights, inputs)
    return config, partial(packers.float4, kind=kind)


PER_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
STATIC = {"num_bits": 8, "dynamic": False, "strategy": "tensor", "symmetric": True}
DEEPSEEK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

#: Config, packer, and the format that weights are held in.
LAYOUTS = {
    "gptq-4": (*gptq(group=128), Int4Weight),
    "gptq-4-small-groups": (*gptq(group=32, version=2), Int4Weight),
    "gptq-4-symmetric": (*gptq(group=64, symmetric=True), Int4Weight),
    "gptq-4-one-group": (*gptq(), Int4Weight),
    "gptq-4-act-order": (*gptq(group=64, act_order=True), Int4Weight),
    "gptq-2": (*gptq(bits=2, group=64), Int4Weight),
    "gptq-3": (*gptq(bits=3, group=32), Int4Weight),
    "gptq-3-symmetric": (*gptq(bits=3, group=64, symmetric=True), Int4Weight),
    "gptq-8": (*gptq(bits=8, group=64), GroupedWeight),
    "gptq-8-symmetric": (*gptq(bits=8, symmetric=True), Int8Weight),
    "gptq-8-act-order": (*gptq(bits=8, group=64, act_order=True, version=2), GroupedWeight),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        partial(packers.awq, group=64),
        Int4Weight,
    ),
    "awq-without-zeros": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
        partial(packers.awq, group=64, symmetric=True, stored=False),
        Int4Weight,
    ),
    "awq-zeros-in-the-middle": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
        partial(packers.awq, group=64, symmetric=True),
        Int4Weight,
    ),
    "nvfp4": (*float4("nvfp4", "tensor_group", 16), GroupedWeight),
    "mxfp4": (*float4("mxfp4", "group", 32), GroupedWeight),
    "packed-4": (*packed(group=128), Int4Weight),
    "packed-4-zeros": (*packed(group=32, symmetric=False), Int4Weight),
    "packed-4-act-order": (*packed(group=64, act_order=True), Int4Weight),
    "packed-4-channel": (*packed(), Int4Weight),
    "packed-8": (*packed(bits=8), Int8Weight),
    "packed-8-groups": (*packed(bits=8, group=64, symmetric=False), GroupedWeight),
    "int8": (*signed(), Int8Weight),
    "int8-tensor": (*signed(strategy="tensor"), Int8Weight),
    "int8-zeros": (*signed(symmetric=False), GroupedWeight),
    "int8-groups": (*signed(strategy="group", group=64), GroupedWeight),
    "w8a8": (*signed(PER_TOKEN | {"type": "int"}), Int8Weight),
    "w8a8-static": (*signed(STATIC | {"type": "int"}, static=True), Int8Weight),
    "fp8-tensor": (*floats(), Fp8Weight),
    "fp8-channel": (*floats(PER_TOKEN | {"type": "float"}, block=(1, None)), Fp8Weight),
    "fp8-static": (*floats(STATIC | {"type": "float"}, static=True), Fp8Weight),
    "fp8-block": (*floats(PER_TOKEN | {"type": "float"}, block=(128, 128)), Fp8Weight),
    "deepseek": (
        DEEPSEEK,
        partial(packers.floats, block=(128, 128), scales=".weight_scale_inv"),
        Fp8Weight,
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(packers.floats, scalar=True, static=True),
        Fp8Weight,
    ),
    "fbgemm": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
        partial(packers.floats, block=(1, None)),
        Fp8Weight,
    ),
    "nf4": (NF4, packers.nf4, GroupedWeight),
    "nf4-nested": (
        NF4 | {"bnb_4bit_use_double_quant": True},
        partial(packers.nf4, nested=True),
        GroupedWeight,
    ),
    "llm-int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        packers.int8_rows,
        Int8Weight,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_what_their_numbers_stand_for(name, tmp_path):
    config, module, held = LAYOUTS[name]
    pair = make_pair(tmp_path, config, module)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2), Shard(2, 4), Shard(3, 4)):
        packed, dense = read(pair.packed, shard), read(pair.dense, shard)
        assert packed.keys() == dense.keys()
        for key, weight in packed.items():
            torch.testing.assert_close(
                dense_of(weight), dense[key], rtol=1e-6, atol=1e-7, msg=f"{key} of {shard}"
            )
        # A part that is inside one group may be held more simply.
        for key in ("0.qkv", "0.output", "0.up", "0.down") if shard == Shard() else ():
            assert {type(part) for part in packed[key].parts} == {held}


def nested(quantisation: dict[str, Any], *, within: bool, **text: Any) -> dict[str, Any]:
    """A config whose text model's is a part of it; `within`: so is how that is quantised."""
    own = CONFIG | text | ({"quantization_config": quantisation} if within else {})
    del own["architectures"]
    outer = {} if within else {"quantization_config": quantisation}
    return {"text_config": own, "vision_config": {"depth": 1}, **outer}


#: Published ones, the names of whose modules have a prefix: the fp8 of Qwen's and Mistral's, and
#: Kimi's experts of 4 bits.
NESTED_LAYOUTS = {
    "qwen3-vl-fp8": (
        "Qwen3VLForConditionalGeneration",
        DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.visual.blocks.0.mlp"]},
        partial(packers.floats, block=(128, 128), scales=".weight_scale_inv"),
        {"model_type": "qwen3_vl_text", "head_dim": 24},
    ),
    "qwen3-vl-moe-fp8": (
        "Qwen3VLMoeForConditionalGeneration",
        DEEPSEEK | {"ignored_layers": ["lm_head", "model.language_model.layers.0.mlp.gate"]},
        partial(packers.floats, block=(128, 128), scales=".weight_scale_inv"),
        {
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 24,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 384,
        },
    ),
    "mistral3-fp8": (
        "Mistral3ForConditionalGeneration",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector"],
        },
        partial(
            packers.floats,
            scalar=True,
            static=True,
            scales=".weight_scale_inv",
            inputs_scale=".activation_scale",
        ),
        {"model_type": "ministral3", "head_dim": 24},
    ),
    "kimi-k2.5-int4": (
        "KimiK25ForConditionalGeneration",
        packed(group=32)[0] | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]},
        partial(packers.packed, group=32),
        {
            "model_type": "kimi_k2",
            "num_key_value_heads": 8,
            "kv_lora_rank": 64,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
}


@pytest.mark.parametrize("name", NESTED_LAYOUTS)
def test_modules_of_a_text_model_within_another(name, tmp_path):
    """Tensors of images may lie beside them, in whatever layout."""
    architecture, quantisation, module, text = NESTED_LAYOUTS[name]
    within = "kimi" in name

    def left(base: str) -> bool:
        dense = "self_attn" in base or "shared" in base
        return "embed_tokens" in base or base.endswith("lm_head") or (within and dense)

    config = nested(quantisation, within=within, **text)
    pair = make_pair(tmp_path, None, module, left=left, architectures=[architecture], **config)
    own = config["text_config"] if within else config
    assert own.pop("quantization_config") is quantisation
    (pair.dense / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": [architecture], **config})
    )
    stored = load_file(pair.packed / "model.safetensors")
    part = NESTED[architecture].unused[0]
    stored[f"{part}.blocks.0.mlp.weight"] = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file(stored, pair.packed / "model.safetensors")
    packed, dense = read(pair.packed, Shard()), read(pair.dense, Shard())
    assert packed.keys() == dense.keys()
    assert any(not isinstance(weight, torch.Tensor) for weight in packed.values())
    for key, weight in packed.items():
        torch.testing.assert_close(dense_of(weight), dense[key], rtol=1e-6, atol=1e-7, msg=key)


#: 384 features on two ranks are 192, against blocks of 128; on four they are 96.
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "head_dim": 24,
    "norm_topk_prob": True,
}


def without_routers(config):
    """Where a config must say that they are dense."""
    lists = {"compressed-tensors": "ignore", "fp8": "modules_to_not_convert"}
    key = lists.get(config["quant_method"])
    return config if key is None else config | {key: ["lm_head", "model.layers.0.mlp.gate"]}


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if not name.endswith(("-act-order", "-small-groups"))]
)
def test_experts_are_held_as_they_are_stored(name, tmp_path):
    config, module, held = LAYOUTS[name]
    pair = make_pair(tmp_path, without_routers(config), module, **MIXTURE)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2), Shard(3, 4)):
        packed, dense = read(pair.packed, shard), read(pair.dense, shard)
        for key in ("0.experts.gate_up", "0.experts.down"):
            stack = packed[key]
            assert isinstance(stack, StackedWeight), (key, shard)
            torch.testing.assert_close(dense_of(stack), dense[key], rtol=1e-6, atol=1e-7, msg=key)
            if shard == Shard():
                assert isinstance(stack.rows, held)


@pytest.mark.parametrize("name", ["gptq-4-act-order", "gptq-8-act-order"])
def test_experts_whose_inputs_are_in_orders_of_their_own_become_dense(name, tmp_path):
    config, module, _ = LAYOUTS[name]
    pair = make_pair(tmp_path, config, module, **MIXTURE)
    packed, dense = (read(folder, Shard(1, 2)) for folder in (pair.packed, pair.dense))
    for key in ("0.experts.gate_up", "0.experts.down"):
        torch.testing.assert_close(packed[key], dense[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["awq", "int8", "nf4", "fp8-tensor"])
def test_a_mixture_says_what_the_dense_one_says(name, tmp_path, schedule, text):
    says_the_same(LAYOUTS[name], tmp_path, schedule, text, MIXTURE)


@pytest.mark.parametrize(
    "name", ["gptq-4-act-order", "awq", "packed-8-groups", "nf4", "fp8-tensor"]
)
def test_a_model_says_what_the_dense_one_says(name, tmp_path, schedule, text):
    says_the_same(LAYOUTS[name], tmp_path, schedule, text, {})


def says_the_same(layout, tmp_path, schedule, text, more):
    config, module, _ = layout
    pair = make_pair(tmp_path, without_routers(config), module, **more)
    tokens, results = [token % 96 for token in text(21)], []
    for folder in (pair.packed, pair.dense):
        model = load_model(folder, dtype=None, device=CPU, progress=lambda done, total: None)
        scheduler = schedule(model)
        sequence = scheduler.sequence(tokens)
        results.append(torch.cat([scheduler.step([(sequence, n)])[0] for n in (12, 1, 7, 1)]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)
