"""GGUF files of tiny models: names, orders of rows, config.json and tokenizer come back."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.convert import gguf_source
from tokenpod.models.convert.gguf_config import Metadata, _llama3
from tokenpod.models.convert.gguf_source import Gguf
from tokenpod.models.folder import read_config

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo" / "tokenizer.json"
#: By GGUF's name of the architecture: the golden checkpoint.
KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"}
KINDS["gemma3"] = "gemma3"

#: What files can't say: the scale of queries but for the largest models, and in which layers Gemma
#: 3 has no window, which is every sixth one.
MORE = {"gemma2": {"query_pre_attn_scalar": 16}}
MORE["gemma3"] = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "layer_types": None}


def in_pairs(rows, heads):
    """Rows of llama.cpp's order: those that are rotated together lie side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tokenizer(writer, split):
    """The embedded model's, as llama.cpp writes byte-level BPE."""
    about = json.loads(DEMO.read_text())["model"]
    tokens = sorted(about["vocab"], key=about["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    # Token 0 is a special one, which begins each text.
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_token_merges([" ".join(pair) for pair in about["merges"]])


def write(path, name, golden, quantised=(), split="gpt-2", **writing):
    """A golden checkpoint as llama.cpp's converter writes it; `quantised`: endings and types."""
    config = json.loads((golden.folder / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"].get("rope_theta")
    if theta is None:
        theta = config["rope_parameters"]["full_attention"]["rope_theta"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, name, **writing)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    if name.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        if (cap := config.get("attn_logit_softcapping")) is not None:
            writer.add_attn_logit_softcapping(cap)
        if (cap := config.get("final_logit_softcapping")) is not None:
            writer.add_final_logit_softcapping(cap)
    write_tokenizer(writer, split)
    arch = next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    expected = load_file(golden.folder / "model.safetensors")
    for stored, tensor in expected.items():
        data = tensor.float().numpy()
        if name == "llama" and (found := re.search(r"self_attn\.([qk])_proj", stored)):
            data = in_pairs(data, heads if found[1] == "q" else kv_heads)
        if name.startswith("gemma") and stored.endswith("norm.weight"):
            data = data + 1
        theirs = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        kind = next((kind for end, kind in quantised if stored.endswith(end)), None)
        if kind is None:
            writer.add_tensor(theirs, np.ascontiguousarray(data))
            continue
        blocks = quantize(data, kind)
        writer.add_tensor(theirs, blocks, raw_dtype=kind)
        expected[stored] = torch.from_numpy(dequantize(blocks, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


#: Endings of names, and the blocks that they are stored in.
QUANTISED = [
    ("up_proj.weight", gguf.GGMLQuantizationType.Q8_0),
    ("k_proj.weight", gguf.GGMLQuantizationType.Q5_1),
    ("gate_proj.weight", gguf.GGMLQuantizationType.Q4_0),
    ("embed_tokens.weight", gguf.GGMLQuantizationType.BF16),
    ("lm_head.weight", gguf.GGMLQuantizationType.F16),
]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_becomes_the_checkpoint_that_it_was_made_of(golden, tmp_path, convert_to, name):
    checkpoint = golden(KINDS[name], **MORE.get(name, {}))
    quantised = QUANTISED if name == "qwen2" else ()
    expected = write(tmp_path / "model.gguf", name, checkpoint, quantised)
    # Which saves making one.
    (tmp_path / "tokenizer.json").write_bytes(DEMO.read_bytes())
    made = convert_to(tmp_path / "model.gguf", dtype="float32")
    stored = load_file(made / "model.safetensors")
    assert stored.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(stored[key], tensor, rtol=0, atol=1e-6)
    assert read_config(made) == read_config(checkpoint.folder)


def byte_level():
    """The tokenizer that llama.cpp's file describes."""
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_the_tokenizer_comes_along(golden, tmp_path, convert_to):
    write(tmp_path / "model.gguf", "llama", golden("llama"))
    made = convert_to(tmp_path / "model.gguf")
    own = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in ("def hello(name):\n    return f'héllo {name} 世界'\n", " 12345 don't\t<|begin|>"):
        # The file says that a text begins with token 0, which is a special one.
        assert own.encode(text).ids == byte_level().encode(text).ids
        ids = own.encode(text, add_special_tokens=False).ids
        assert own.decode(ids, skip_special_tokens=False) == text
    # Without a wish, plain numbers keep their type.
    assert json.loads((made / "config.json").read_text())["dtype"] == "float32"


def test_several_files_are_one_model(golden, tmp_path, convert_to):
    expected = write(tmp_path / "model.gguf", "llama", golden("llama"), split_max_tensors=7)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert parts[0].name == f"model-00001-of-{len(parts):05d}.gguf"
    for source in (tmp_path, parts[-1]):
        made = load_file(convert_to(source) / "model.safetensors")
        assert made.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(made[name], tensor, msg=name)
        shutil.rmtree(tmp_path / "made")
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    names = [part.name for part in parts]
    for part, name in zip(parts, [names[0], names[2], names[1], *names[3:]], strict=True):
        shutil.copy(part, swapped / name)
    said = refused(convert_to, swapped / names[0])
    assert f"it is part 3 of {len(parts)} by its metadata, and 2 of {len(parts)} by its" in said
    shutil.rmtree(tmp_path / "made")
    parts[1].unlink()
    assert f"{parts[1]} is missing: the model has {len(parts)} files" in refused(
        convert_to, parts[0]
    )


def test_a_tokenizer_beside_the_file_wins(golden, tmp_path, convert_to):
    write(tmp_path / "model.gguf", "llama", golden("llama"), split="odd")
    said = refused(convert_to, tmp_path / "model.gguf")
    assert "splits texts by 'odd', which is not supported: put the model's tokenizer.json" in said
    shutil.rmtree(tmp_path / "made")
    (tmp_path / "tokenizer.json").write_bytes(DEMO.read_bytes())
    (tmp_path / "config.json").write_text("{}")
    made = convert_to(tmp_path / "model.gguf")
    assert (made / "tokenizer.json").read_bytes() == DEMO.read_bytes()
    assert read_config(made).layers


def test_llama_3s_factors_become_its_parameters():
    wanted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    wanted |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        rope_parameters={**wanted, "rope_theta": 500_000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    data = Metadata({"general.architecture": "llama", "llama.rope.freq_base": 5e5}, "model.gguf")
    factors = (plain / scaled).numpy()
    assert _llama3(data, factors) == wanted
    with pytest.raises(ModelError, match=r"factors that are not Llama 3's"):
        _llama3(data, factors[::-1])


def refused(convert_to, path):
    with pytest.raises(ModelError, match=r"^[^\n]+$") as caught:
        convert_to(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "metadata", "said"),
    [
        ("mamba", {}, "architecture mamba is not supported (supported: llama,"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count is set"),
        ("llama", {"split.count": 2}, "part 1 of 2 by its metadata, and 1 of 1 by its name"),
        ("llama", {"llama.block_count": 0}, "llama.block_count is 0; expected a whole number"),
        ("llama", {"llama.rope.dimension_count": 4}, "heads of 8 with 4 rotated"),
        ("llama", {"tokenizer.ggml.model": "odd"}, "its tokenizer (odd) can't be converted"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, convert_to, name, metadata, said):
    plain = {"attention.head_count": 8, "embedding_length": 64, "feed_forward_length": 64}
    plain |= {"block_count": 1, "context_length": 64}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    values = {**{f"{name}.{key}": value for key, value in plain.items()}, **metadata}
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert said in refused(convert_to, tmp_path / "model.gguf")


def test_blocks_of_other_kinds_are_named(golden, tmp_path, convert_to, monkeypatch):
    quantised = [("up_proj.weight", gguf.GGMLQuantizationType.Q5_1)]
    write(tmp_path / "model.gguf", "llama", golden("llama"), quantised)
    monkeypatch.setattr(Gguf, "_write_tokenizer", lambda self, folder: None)
    monkeypatch.setattr(gguf_source, "block_formats", lambda: ("Q8_0",))
    said = refused(convert_to, tmp_path / "model.gguf")
    assert "blk.0.ffn_up.weight is Q5_1, which is not supported (supported: F32, F16" in said


def test_all_formats_of_blocks_that_the_package_reads_are_converted():
    named = gguf_source.block_formats()
    assert {"Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS"} < set(named)
    assert not {"Q8_K", "I32", "F32"} & set(named)


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000])
def test_a_part_of_a_file_is_refused(golden, tmp_path, convert_to, kept):
    path = tmp_path / "model.gguf"
    write(path, "llama", golden("llama"))
    path.write_bytes(path.read_bytes()[:kept])
    assert "not a whole GGUF file" in refused(convert_to, path)


def test_without_the_package_its_extra_is_named(tmp_path, convert_to, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'tokenpod[gguf]'" in refused(convert_to, tmp_path / "model.gguf")
