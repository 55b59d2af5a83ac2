"""Virtual tokens of every family, their encoders, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.checkpoints.virtual_folders import P_TUNING, PREFIX, PROMPT, Expected, write_virtual
from support.engines.virtual_engine import Engine
from tokenpod.core.adapters import AdapterKind
from tokenpod.models.adapters.virtual import VirtualBase, read_virtual
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.tensor_file import TensorFile
from tokenpod.models.folder import read_config
from tokenpod.models.weights.shard import WHOLE, Shard

NEW = 3

#: Positions learned and rotated (in part, interleaved), slopes, scaled embeddings, narrow ones.
FAMILIES = ("llama-grouped-tied", "gptj", "gpt2", "bloom", "gemma2", "granite", "opt-350m", "glm")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_says_what_transformers_says(family, golden, text, tmp_path):
    base, ids = golden(family).folder, text(6)
    folders = [
        write_virtual(tmp_path / "prompt", base, PROMPT, 4),
        write_virtual(tmp_path / "prefix", base, PREFIX, 5, seed=1),
    ]
    engine, expected = Engine(base, folders), Expected(base)
    asked = [engine.ask(adapter, ids, NEW) for adapter in (1, 2)]
    for folder, answer in zip(folders, engine.run(*asked), strict=True):
        tokens, scores = expected.greedy(folder, ids, NEW)
        assert answer.tokens == tokens
        wanted = [float(scores[len(ids) - 1 + at, token]) for at, token in enumerate(tokens)]
        assert answer.logprobs == pytest.approx(wanted, abs=2e-5)


def read(folder: Path, base: Path, shard: Shard = WHOLE, positions: int = 64) -> Any:
    fields = read_fields(folder / "adapter_config.json")
    fit = VirtualBase(read_config(base), shard, torch.float32, positions)
    file = TensorFile(folder / "adapter_model.safetensors")
    try:
        return read_virtual(file, fields, fit)
    finally:
        file.close()


@pytest.mark.parametrize("family", ["llama-grouped-tied", "gptj"])
def test_a_rank_has_its_heads_of_a_prefix(family, golden, tmp_path):
    base = golden(family).folder
    folder = write_virtual(tmp_path / "a", base, PREFIX, 3)
    whole = read(folder, base).numbers
    ranks = [read(folder, base, Shard(rank, 2)).numbers for rank in range(2)]
    heads = whole.shape[3]
    if heads == 1:  # fewer than ranks: each has it
        assert all(torch.equal(part, whole) for part in ranks)
    else:
        torch.testing.assert_close(torch.cat(ranks, 3), whole)


class Encoder(nn.Module):
    """What PEFT trains a prompt or a prefix through, by its names."""

    def __init__(self, kind: str, width: int, numbers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, width)
        if kind == "LSTM":
            self.lstm_head = nn.LSTM(width, 6, 2, bidirectional=True, batch_first=True)
            self.mlp_head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, numbers))
        elif kind == "MLP":
            layers = (nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
            self.mlp_head = nn.Sequential(*layers, nn.Linear(6, numbers))
        else:
            self.transform = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, numbers))

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        x = self.embedding.weight[None]
        if hasattr(self, "lstm_head"):
            x = self.lstm_head(x)[0]
        return (self.transform if hasattr(self, "transform") else self.mlp_head)(x)[0]


@pytest.mark.parametrize("through", ["MLP", "LSTM", "projection"])
def test_an_encoder_that_was_saved_itself_is_run_once(through, golden, tmp_path):
    base = golden("llama").folder
    peft = PREFIX if through == "projection" else P_TUNING
    plain = write_virtual(tmp_path / "plain", base, peft, 4)
    numbers = load_file(plain / "adapter_model.safetensors")["prompt_embeddings"].shape[1]
    torch.manual_seed(3)
    encoder = Encoder(through, 8 if through == "projection" else numbers, numbers)
    made = {"prompt_embeddings": encoder()}
    state = {f"prompt_encoder.default.{n}": t for n, t in encoder.state_dict().items()}
    config = {"encoder_hidden_size": 6, "encoder_reparameterization_type": through}
    saved = write_virtual(tmp_path / "saved", base, peft, 4, tensors=made, **config)
    itself = write_virtual(tmp_path / "itself", base, peft, 4, tensors=state, **config)
    found, wanted = read(itself, base), read(saved, base)
    assert found.kind is (AdapterKind.PREFIX if through == "projection" else AdapterKind.PROMPT)
    assert found.virtual_tokens == 4
    torch.testing.assert_close(found.numbers, wanted.numbers)


CONFIGS = {
    "another kind": ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "peft_type 'MULTITASK_PROMPT_TU"),
    "two stacks": ({"num_transformer_submodules": 2}, "num_transformer_submodules 2 is not"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which"),
    "a field of tomorrow": ({"use_tomorrow": 3}, "use_tomorrow is 3, which is not supported"),
    "no tokens": ({"num_virtual_tokens": 0}, "num_virtual_tokens is 0; expected a whole number"),
    "too many": ({"num_virtual_tokens": 64}, "num_virtual_tokens is 64; sequences of this server"),
    "of another number": ({"num_virtual_tokens": 5}, r"is \[4, 64\]; of this base .* \[5, 64\]"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_understood_is_refused_by_the_field(case, golden, tmp_path):
    config, said = CONFIGS[case]
    base = golden("llama").folder
    folder = write_virtual(tmp_path / "a", base, PROMPT, 4)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ModelError, match=said):
        read(folder, base)


ZEROS = torch.zeros(4, 64)
STATE = "prompt_encoder.default."
TENSORS = {
    "another width": ({"prompt_embeddings": torch.zeros(4, 32)}, r"\[4, 32\]; of this base"),
    "no matrix": ({"prompt_embeddings": torch.zeros(4)}, r"is \[4\]; of this base"),
    "not finite": ({"prompt_embeddings": ZEROS / 0}, "numbers that are not finite"),
    "whole numbers": ({"prompt_embeddings": ZEROS.int()}, "holds I32 numbers"),
    "something beside": (
        {"prompt_embeddings": ZEROS, "x": ZEROS.clone()},
        "x is not understood beside",
    ),
    "something else": ({"prompt_task_cols": ZEROS}, "no prompt_embeddings, but prompt_task_cols"),
    "an encoder without a prompt": ({f"{STATE}mlp_head.0.weight": ZEROS}, "no embedding.weight"),
    "half an encoder": (
        {f"{STATE}embedding.weight": ZEROS, f"{STATE}mlp_head.0.weight": torch.zeros(64, 64)},
        "mlp_head.0 has no bias",
    ),
    "an encoder that does not fit": (
        {
            f"{STATE}embedding.weight": ZEROS,
            f"{STATE}mlp_head.0.weight": torch.zeros(64, 63),
            f"{STATE}mlp_head.0.bias": torch.zeros(64),
        },
        "its tensors make no encoder of prompts",
    ),
    "half an LSTM": (
        {f"{STATE}embedding.weight": ZEROS, f"{STATE}lstm_head.weight_hh_l0": torch.zeros(24, 6)},
        "its tensors make no encoder of prompts",
    ),
    "an LSTM of many layers": (
        {f"{STATE}embedding.weight": ZEROS, f"{STATE}lstm_head.weight_hh_l99": torch.zeros(24, 6)},
        "lstm_head is no LSTM of 1 to 16 layers",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_another_base_are_refused(case, golden, tmp_path):
    tensors, said = TENSORS[case]
    base = golden("llama").folder
    folder = write_virtual(tmp_path / "a", base, PROMPT, 4, tensors=tensors)
    with pytest.raises(ModelError, match=f"adapter_model.safetensors: .*{said}"):
        read(folder, base)


def test_a_prefix_is_refused_where_rows_are_latent(golden, tmp_path):
    base = golden("deepseek-v2-lite").folder
    tensors = {"prompt_embeddings": torch.zeros(4, 64)}
    folder = write_virtual(tmp_path / "a", base, PREFIX, 4, tensors=tensors)
    with pytest.raises(ModelError, match="caches latent rows: prefix tuning has keys and values"):
        read(folder, base)


def test_a_cut_file_is_refused(golden, tmp_path):
    base = golden("llama").folder
    folder = write_virtual(tmp_path / "a", base, PROMPT, 4)
    weights = folder / "adapter_model.safetensors"
    save_file({"prompt_embeddings": ZEROS}, weights)
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        read(folder, base)
