"""Weights that are read by threads while the model that has them is made."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.checkpoints.golden_kinds import KINDS
from tokenpod.kernels.backends.triton import OPERATIONS
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.folder import is_native, read_layout
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.pooling.head import PoolingHead
from tokenpod.models.weights.later import Later

CPU = torch.device("cpu")


def read(folder, files, later=None, progress=lambda done, total: None):
    checkpoint = files.enter_context(Checkpoint(folder))
    layout = read_layout(folder, checkpoint)
    dtype = layout.spec.dtype or torch.float32
    weights = read_weights(
        checkpoint,
        layout.weights,
        dtype=dtype,
        device=CPU,
        progress=progress,
        reader=layout.reader,
        later=later,
    )
    return layout, weights


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


class Looks(TorchDispatchMode):
    """Operations that read numbers of some tensors: all that make no views of them."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {storage(each) for each in tensors}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, torch.Tensor) and storage(x) in self.storages]
        if given and not (isinstance(made, torch.Tensor) and storage(made) == storage(given[0])):
            self.found.append(func)
        return made


@pytest.mark.sampled(8, "slow")
@pytest.mark.parametrize("family", KINDS)
def test_no_layer_looks_at_a_weight_that_comes_later(family, golden):
    folder = golden(family).folder
    if not is_native(folder):
        return
    with ExitStack() as files:
        later = Later(CPU)
        layout, weights = read(folder, files, later)
        late = [each for each in weights.values() if type(each) is torch.Tensor and not each.any()]
        pooling = None if layout.pooling is None else PoolingHead(layout.pooling)
        with Looks(late) as looks:
            Decoder(layout.spec, weights, OPERATIONS, pooling=pooling)
    assert looks.found == []


def test_weights_are_zeros_until_they_have_been_waited_for(golden):
    folder, heard = golden("llama").folder, []
    with ExitStack() as files:
        _, expected = read(folder, files)
        later = Later(CPU)
        _, weights = read(folder, files.pop_all(), later, lambda *each: heard.append(each))
    zeros = {name for name, weight in weights.items() if not weight.any()}
    assert {"embedding", "0.qkv", "1.down"} <= zeros
    assert not any("norm" in name for name in zeros)
    with ExitStack() as files:
        assert later.ended == 0.0
        later.begin(files.pop_all())
        later.wait()
    assert 0.0 < later.ended <= time.monotonic()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert heard[0][0] == 0
    assert heard[-1] == (heard[0][1],) * 2


def test_a_file_that_is_cut_meanwhile_is_an_error_of_the_wait(golden, tmp_path):
    source = golden("llama").folder
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    files, later = ExitStack(), Later(CPU)
    read(tmp_path, files, later)
    os.truncate(tmp_path / "model.safetensors", 4096)
    later.begin(files)
    with pytest.raises(ModelError, match="can't be read: the file ends before it"):
        later.wait()
