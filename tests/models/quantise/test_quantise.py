"""`tokenpod quantize`: what it writes is what its rules say, and the server reads it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints.packers import in_words
from support.checkpoints.published import CONFIG, CPU, dense_of, make_pair, read
from tokenpod.core.manifest import digest_of
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.load import load_model
from tokenpod.models.quantise.job import Job, quantise
from tokenpod.models.quantise.rounding import least_change, nearest
from tokenpod.models.quantise.targets import packed, target_of
from tokenpod.models.weights.shard import Shard


@pytest.fixture
def dense(tmp_path):
    """A dense checkpoint whose weights are small and random."""

    def module(source, outputs, inputs):
        weight = torch.randn((outputs, inputs), generator=source.generator) * 0.1
        return type("Module", (), {"tensors": {".weight": weight}, "weight": weight})

    def make(**config):
        return make_pair(tmp_path, None, module, **config).dense

    return make


def written(source, folder, name, **more):
    folder.mkdir()
    told: list[tuple[int, int]] = []
    done = quantise(Job(str(source), str(folder), name, **more), lambda *at: told.append(at))
    assert told[-1] == (done.bytes, done.bytes)
    return folder


@pytest.mark.parametrize(
    ("name", "group", "held", "most"),
    [
        # Half a step of each: of 127, of 7.5; e4m3 has a sixteenth of a number.
        ("int8", None, Int8Weight, 0.5 / 127),
        ("int4", 64, Int4Weight, 0.5 / 7.5),
        ("fp8", None, Fp8Weight, 1 / 16),
    ],
)
def test_what_is_written_is_served_and_near(name, group, held, most, dense, tmp_path):
    source = dense()
    folder = written(source, tmp_path / "made", name, group=group)
    small, large = read(folder, Shard()), read(source, Shard())
    for key, weight in large.items():
        made = small[key]
        if isinstance(made, torch.Tensor):
            assert torch.equal(made, dense_of(weight))
            continue
        assert {type(part) for part in made.parts} == {held}
        error = (dense_of(made) - dense_of(weight)).abs()
        assert error.max() <= 1.001 * most * dense_of(weight).abs().max()
    read(folder, Shard(1, 2))
    stored = json.loads((folder / "config.json").read_text())
    assert stored["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert stored.keys() - {"quantization_config"} == CONFIG.keys()
    listed = dict(
        reversed(line.split(maxsplit=1))
        for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    assert listed["model.safetensors"] == digest_of(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_is_written_is_what_is_made_while_loading(name, dense, tmp_path):
    """The same numbers, scales and rounding of inputs. Of int4 what is made has bfloat16 scales."""
    source = dense(hidden_size=256, intermediate_size=256)
    folder = written(source, tmp_path / "made", name)
    stored, made = read(folder, Shard()), read(source, Shard(), quantize=name)
    for key, weight in made.items():
        assert torch.equal(dense_of(stored[key]), dense_of(weight)), key
        if not isinstance(weight, torch.Tensor):
            ours, theirs = ([part.rounding for part in w.parts] for w in (weight, stored[key]))
            assert ours == theirs


@pytest.mark.parametrize(
    ("name", "form"),
    [("int8", "pack-quantized"), ("int4", "pack-quantized"), ("fp8", "float-quantized")],
)
def test_what_is_written_is_read_by_compressed_tensors(name, form, dense, tmp_path):
    """Its config, and modules that its own code unpacks, say what ours read."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = written(dense(hidden_size=256), tmp_path / "made", name)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(config)
    assert theirs.format == form
    assert theirs.quantization_status.value == "compressed"
    (scheme,) = theirs.config_groups.values()
    stored, (down,) = load_file(folder / "model.safetensors"), read(folder, Shard())["0.down"].parts
    begin = "model.layers.0.mlp.down_proj."
    state = {key.removeprefix(begin): t for key, t in stored.items() if key.startswith(begin)}
    unpacked = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"]
    torch.testing.assert_close(unpacked.float(), down.dequantised(torch.float32))


def test_experts_are_written_too_and_routers_left(dense, tmp_path):
    source = dense(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
        head_dim=24,
    )
    folder = written(source, tmp_path / "made", "int4", group=64)
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.1.down_proj.weight_packed" in names
    assert "model.layers.0.mlp.gate.weight" in names
    read(folder, Shard(1, 2))


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_packed_as_the_layout_says(bits):
    numbers = torch.randint(1 << bits, (5, 70))
    assert torch.equal(packed(numbers.int(), bits), in_words(numbers.t(), bits).t())


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_gptq_changes_products_less_than_rounding_to_the_nearest(name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 256), generator=generator)
    # Inputs that hang together, as real ones do: that is what makes up for rounding.
    mixed = torch.randn((16, 256), generator=generator)
    x = torch.randn((600, 16), generator=generator) @ mixed
    x = x + 0.1 * torch.randn((600, 256), generator=generator)
    target = target_of(name, 64)
    sums = x.t() @ x

    def lost(numbers, scale):
        wide = scale.repeat_interleave(256 // scale.shape[1], 1)
        return ((numbers * wide - weight) @ x.t()).square().sum()

    plain, chosen = (
        lost(*nearest(weight, target, torch.float32)),
        lost(*least_change(weight, sums, target, torch.float32)),
    )
    assert chosen < 0.6 * plain


def test_gptq_with_inputs_that_have_nothing_in_common_is_rounding_to_the_nearest():
    weight = torch.randn((8, 64), generator=torch.Generator().manual_seed(1))
    target = target_of("int4", 32)
    made = least_change(weight, torch.eye(64), target, torch.float32)
    for one, other in zip(made, nearest(weight, target, torch.float32), strict=True):
        assert torch.equal(one, other)


@pytest.mark.compute
def test_a_text_is_run_through_the_model(demo_folder, tmp_path):
    text = tmp_path / "text"
    text.write_text("import os\n\ndef join(path):\n    return os.path.join(path)\n" * 20)
    two_layers(demo_folder, tmp_path / "two")
    chosen = written(tmp_path / "two", tmp_path / "a", "int4", calibrate=str(text), tokens=300)
    plain = written(tmp_path / "two", tmp_path / "b", "int4")
    one, other = (load_file(folder / "model.safetensors") for folder in (chosen, plain))
    assert one.keys() == other.keys()
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(one[f"{name}_packed"], other[f"{name}_packed"])
    assert torch.equal(one[f"{name}_scale"], other[f"{name}_scale"])
    model = load_model(chosen, dtype=None, device=CPU, progress=lambda done, total: None)
    assert model.quantization == "compressed-tensors int4"


def two_layers(source, folder):
    """The first of a model."""
    shutil.copytree(source, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 2}))
    tensors = load_file(source / "model.safetensors")
    later = re.compile(r"model\.layers\.([2-9]|\d\d)\.")
    kept = {name: tensor for name, tensor in tensors.items() if not later.match(name)}
    (folder / "model.safetensors").unlink()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def demo_folder():
    from pathlib import Path

    import tokenpod.models.demo

    return Path(tokenpod.models.demo.__file__).parent


@pytest.mark.parametrize(
    ("name", "group", "config", "message"),
    [
        ("int4", 128, {}, "has 192 inputs, which groups of 128 don't divide"),
        (
            "int8",
            None,
            {
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": 64,
                "n_layer": 1,
                "n_head": 4,
                "n_positions": 64,
            },
            r"as \[in, out\]",
        ),
    ],
)
def test_what_can_not_be_written_is_refused(name, group, config, message, dense, tmp_path):
    with pytest.raises(ModelError, match=message):
        written(dense(**config), tmp_path / "made", name, group=group)


def test_what_is_quantised_is_not_quantised_again(dense, tmp_path):
    made = written(dense(), tmp_path / "made", "int8")
    with pytest.raises(ModelError, match=r"quantised already \(compressed-tensors int8\)"):
        written(made, tmp_path / "again", "int4", group=64)


def test_a_tensor_with_numbers_that_are_none_is_refused(dense, tmp_path):
    from safetensors.torch import save_file

    source = dense()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.weight holds numbers that are none"):
        written(source, tmp_path / "made", "int8")
