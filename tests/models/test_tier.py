"""Families that we don't have: transformers' code, over our pool and with our attention."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.apertus import modeling_apertus

from support.checkpoints.golden_kinds import TIER_KINDS
from support.engines.small_engines import Engine, requests_of
from support.steps.hand_scheduler import HandScheduler
from support.steps.walks import walk
from tokenpod.core.own_state import OwnState
from tokenpod.kernels.backends import reference
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.folder import read_config
from tokenpod.models.load import load_model
from tokenpod.models.tier.dispatch import Recorder
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.load import TierLoader
from tokenpod.models.tier.masks import Reach, describe_mask
from tokenpod.models.weights.shard import Shard

pytestmark = pytest.mark.compute


@pytest.mark.parametrize(
    "name",
    # The kind with shared layers has experts, too.
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "gemma4-experts")) for x in TIER_KINDS],
)
def test_the_model_says_what_transformers_says(name, golden, text):
    checkpoint = golden(name)
    walk(HandScheduler(load(checkpoint.folder), slots=1024), text).check(checkpoint)


def test_chunks_are_the_same_by_the_row_table(golden, text, monkeypatch):
    monkeypatch.setattr(loading, "operations_for", lambda device: reference.OPERATIONS)
    checkpoint = golden("llama4")
    walk(HandScheduler(load(checkpoint.folder), slots=512), text, 4).check(checkpoint)


def test_half_precision_passes_the_check_and_errs_no_more_than_transformers(golden, text):
    half, tokens = golden("apertus", dtype=torch.bfloat16), text(40)
    ours, exact = HandScheduler(load(half.folder)), load(half.folder, dtype=torch.float32)
    assert ours.model.dtype == torch.bfloat16
    truth = HandScheduler(exact)
    (expected,) = truth.step([(truth.sequence(tokens), 40)])
    sequence = ours.sequence(tokens)
    got = torch.cat([ours.step([(sequence, count)])[0] for count in (23, 1, 16)])
    error, peers = (
        (x - expected).square().mean().sqrt() for x in (got, half.logprobs(tokens).float())
    )
    assert 0 < error <= 1.15 * peers


def test_windows_and_shared_layers_are_known(golden):
    config = load(golden("gemma4-experts-shared").folder).config
    assert config.windows == (9, None)
    assert [kv.key_dim for kv in config.kv_layouts] == [8, 16]
    assert config.sliding_window is None
    assert config.runs_on == "transformers"


def test_experts_are_computed_without_a_copy_of_their_weights_for_each_token(golden):
    served = load(golden("gemma4-experts-shared").folder)
    assert served._halves.model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize(
    ("mask", "size", "reach"),
    [
        (lambda b, h, q, k: k <= q, None, Reach()),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 5, Reach(window=5)),
        (lambda b, h, q, k: (k <= q) & (k // 5 == q // 5), 5, Reach(chunk=5)),
    ],
)
def test_masks_are_described(mask, size, reach):
    assert describe_mask(mask_function=mask, local_size=size) == reach


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (lambda b, h, q, k: k >= 0, None),
        (lambda b, h, q, k: (k <= q) | (k < 4), None),
        (lambda b, h, q, k: (k <= q) & (k > q - 6), 5),
        (lambda b, h, q, k: (k <= q) & torch.ones(3, dtype=torch.bool)[k], None),
    ],
)
def test_other_masks_are_refused(mask, size):
    with pytest.raises(NotServed, match="mask"):
        describe_mask(mask_function=mask, local_size=size)


@pytest.fixture
def folder(golden, tmp_path):
    shutil.copytree(golden("apertus").folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_code_that_a_checkpoint_brings_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('it was run')")
    change(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert type(load(folder)._halves.model).__module__.startswith("transformers.")


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.more": torch.ones(2)}), "has no tensor model.more"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
    ],
    ids=["missing", "surplus", "shape"],
)
def test_weights_that_do_not_fit(folder, edit, message):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    read = []
    refused(folder, message, progress=lambda done, total: read.append(done))
    assert not read, "it is refused before weights are read"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "ApertusForCausalLM is not supported: model_type is llama"),
        (
            {"architectures": ["NoSuchModel"]},
            "NoSuchModel is not supported: transformers .* has no",
        ),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "is missing from the che"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "an encoder with a decoder; with its own cache: config.json has no decoder_start_tok",
        ),
        (
            {"architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2"},
            "has no such causal model",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "is missing from the ch"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "mask is neither causal"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "with dense weights: its quantization_config says gptq",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            None,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_served_is_named(folder, fields, message):
    change(folder, **fields)
    if message is None:  # up to the trained length nothing changes
        load(folder)
    else:
        refused(folder, message)


def test_end_tokens_that_the_model_does_not_have_are_none(folder):
    change(folder, eos_token_id=[5, -1, 1_000_000])
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_config(folder).eos_token_ids == {5}


def test_ranks_and_formats_are_refused(folder):
    with pytest.raises(ModelError, match="runs on 1 rank, and there are 2"):
        loading.check_alone(load(folder).config, Shard(0, 2), None)
    refused(folder, "quantize is int8: ApertusForCausalLM is computed by transf", quantize="int8")


def test_a_state_beside_keys_and_values_is_found_by_the_check(folder, monkeypatch):
    """Here each token also reads the one before it in the step, whosever that is."""
    plain = modeling_apertus.ApertusMLP.forward
    monkeypatch.setattr(
        modeling_apertus.ApertusMLP, "forward", lambda self, x: plain(self, x + x.roll(1, 1))
    )
    refused(folder, "its logits are others in pieces, beside another text than in one step")


def test_attention_that_is_not_left_to_us_is_found_by_the_check(folder, monkeypatch):
    """Here the first layer's attention is its own, over the tokens of the step."""
    plain = modeling_apertus.ApertusAttention.forward

    def own(self, hidden_states, *arguments, **named):
        if self.layer_idx:
            return plain(self, hidden_states, *arguments, **named)
        seen = hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return seen, None

    monkeypatch.setattr(modeling_apertus.ApertusAttention, "forward", own)
    refused(folder, "does not leave attention to the attention function")
    monkeypatch.setattr(
        modeling_apertus.ApertusAttention,
        "forward",
        lambda self, hidden_states, **named: (hidden_states, None),
    )
    with pytest.raises(NotServed, match="its layers don't call the attention function"):
        over_our_pool(folder)
    assert load(folder).config.own_state == OwnState(0, 0)


def test_an_argument_that_we_do_not_know_is_named():
    module, x = torch.nn.Identity(), torch.zeros(1, 4, 5, 16)
    with pytest.raises(NotServed, match="attention function has an argument slopes, which is not"):
        Recorder()(module, x, x, x, None, slopes=torch.ones(4))
    recorder = Recorder()
    recorder(module, x, x, x, None, slopes=None, dropout=0.0, softcap=30.0)
    assert len(recorder.dispatches) == 1


def test_tokens_are_the_same_with_preemptions(golden, text):
    checkpoint = golden("apertus")
    engine = Engine(checkpoint.folder)
    prompts = [text(length, seed=length) for length in (37, 5, 40, 1, 12, 12)]
    client = engine.answer(requests_of(prompts, scored=True), preempt=0.06)
    assert engine.preempted > 3
    for i, prompt in enumerate(prompts):
        outputs = client.tokens[i]
        truth = checkpoint.logprobs([*prompt, *outputs[:-1]])
        said = torch.tensor([*client.scored[i], *client.logprobs[i]])
        follow = torch.tensor([*prompt[1:], *outputs])[:, None]
        torch.testing.assert_close(said, truth.gather(1, follow)[:, 0], rtol=0, atol=1e-4)
        assert outputs == truth[len(prompt) - 1 :].argmax(-1).tolist()


def over_our_pool(folder):
    fields = read_fields(folder / "config.json")
    TierLoader(
        fields.texts("architectures")[0],
        fields,
        dtype=None,
        eos_token_ids=frozenset(),
        served=256,
    )


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refused(folder, message, **more):
    with pytest.raises(ModelError, match=message) as caught:
        load(folder, **more)
    assert "\n" not in str(caught.value)


def load(folder, **more):
    return load_model(
        folder,
        **{"dtype": None, "max_total_tokens": 256, "progress": lambda done, total: None} | more,
        device=torch.device("cpu"),
    )
