"""The tool that made the embedded model still makes such a model, and measures it rightly."""

import gzip
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

import tokenpod.models.demo

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from demo_model.corpus import is_held_out, shared_lines, split
from demo_model.measure import bits
from demo_model.network import BEGIN_ID, END_ID, Decoder, Shape
from demo_model.prepare import make_tokenizer, statement_starts, write_configuration
from demo_model.training import Options, Windows, train

DEMO = Path(tokenpod.models.demo.__file__).parent


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_a_module_is_held_out_by_its_name_alone() -> None:
    modules = {"email.contentmanager": b"a = 1\n", "argparse": b"b = 2\n", "weakref": b"b = 2\n"}
    train_set, held_out = split(modules)
    assert set(train_set) == {"argparse"}
    # weakref is held out by name, but it repeats a module of the training set.
    assert is_held_out("weakref")
    assert set(held_out) == {"email.contentmanager"}


def test_shared_lines_tell_copies_from_new_code() -> None:
    old = b"\n".join(b"line %d" % i for i in range(20))
    new = b"\n".join(b"other %d" % i for i in range(20))
    assert shared_lines({"old": old}, {"copy": old, "new": new}) == {"copy": 1.0, "new": 0.0}


def test_statement_starts_are_definitions_and_imports_that_begin_a_line() -> None:
    source = (
        b"import os\n\nx = 'def'\n\nclass A:\n    def f(self):\n        pass\n\ndef g():\n    1\n"
    )
    tokenizer = make_tokenizer([source] * 3, 320)
    stream = np.array(tokenizer.encode(source.decode()).ids, dtype=np.uint16)
    starts = statement_starts(tokenizer, stream)
    texts = [tokenizer.decode(stream[i:].tolist()).partition("\n")[0] for i in starts]
    assert texts == ["class A:", "def g():"]


def test_configuration_files_are_those_that_the_tool_writes(tmp_path: Path) -> None:
    write_configuration(tmp_path)
    for path in tmp_path.iterdir():
        assert (DEMO / path.name).read_text() == path.read_text()


def test_a_held_out_module_takes_less_than_half_of_what_gzip_needs(
    model: Any, tokenizer: Tokenizer
) -> None:
    name = "email.contentmanager"
    assert is_held_out(name)
    source = (Path(sysconfig.get_path("stdlib")) / "email" / "contentmanager.py").read_bytes()
    ids = [*tokenizer.encode(source.decode()).ids, END_ID]
    assert bits(model, ids, 2048) < 8 * len(gzip.compress(source, 9)) / 2


def test_windows_of_the_measure_score_each_token_once() -> None:
    def uniform(window: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*window.shape, 256))

    for count in (1, 2, 15, 16, 17, 23, 24, 25, 100):
        assert bits(uniform, [7] * count, 16) == pytest.approx(8 * (count - 1))


def test_training_network_is_the_llama_of_transformers(model: Any) -> None:
    network = Decoder(Shape(), dropout=0.0).eval()
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    network.load_state_dict(weights)
    ids = torch.randint(3, 4096, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
        theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        assert float(network(ids)) == pytest.approx(float(theirs), abs=1e-4)


def test_training_writes_weights_with_the_shipped_names_and_shapes(tmp_path: Path) -> None:
    stream = np.random.default_rng(0).integers(3, 4096, 2000).astype(np.uint16)
    np.save(tmp_path / "train.npy", stream)
    np.save(tmp_path / "held_out.npy", stream[:200])
    np.save(tmp_path / "starts.npy", np.arange(5, 100, 7))
    options = Options(steps=2, rows=4, length=16, evaluate_every=2, compile=False)
    train(tmp_path, tmp_path / "model", options)
    with (
        safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as made,
        safe_open(DEMO / "model.safetensors", framework="pt") as shipped,
    ):
        assert set(made.keys()) == set(shipped.keys())
        for name in made.keys():  # noqa: SIM118
            assert made.get_slice(name).get_shape() == shipped.get_slice(name).get_shape()


def test_windows_tile_the_stream_and_open_at_statements() -> None:
    stream = torch.arange(10, 1010)
    starts = torch.tensor([100, 200, 300])
    windows = Windows(stream, starts, 8, 9, torch.Generator().manual_seed(0))
    batch = windows.batch()
    assert batch.shape == (8, 10)
    assert (batch[:6].diff(dim=1) == 1).all()
    assert (batch[6:, 0] == BEGIN_ID).all()
    assert {int(first) - 10 for first in batch[6:, 1]} <= {100, 200, 300}
