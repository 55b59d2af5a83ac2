"""Safetensors files that are damaged, cut or lie: an error that names the file, and nothing else.

FUZZ_EXAMPLES scales how many damaged files are tried: FUZZ_EXAMPLES=300 takes about a minute.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.pieces import PIECE_BYTES, Pieces
from tokenpod.models.checkpoints.tensor_file import TensorFile

EXAMPLES = 30 * int(os.environ.get("FUZZ_EXAMPLES", "10"))


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def tensor(begin=0, end=8, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor(0, 4)}, r"a of F32 and shape \[2\] has 4 bytes"),
        ({"a": tensor(shape=(1 << 61, 1 << 61))}, r"has 8 bytes"),
        ({"a": tensor(shape=(1 << 70,))}, "can't be"),
        ({"a": tensor(shape=(-1, -2))}, "can't be"),
        ({"a": tensor(shape=(True, 2))}, "can't be"),
        ({"a": tensor(shape=[1] * 17)}, "at most 16 numbers"),
        ({"a": tensor(8, 0)}, r"data_offsets \(8, 0\)"),
        ({"a": tensor(), "b": tensor()}, "b begins at byte .*, not at"),
        ({"a": tensor(), "b": tensor(4, 12)}, "b begins at byte"),
        ({"a": tensor(4, 12)}, "a begins at byte"),
        ({"a": tensor(), "b": tensor(8, 16)}, "its tensors end at byte"),
        ({}, "its tensors end at byte"),
        ({"a": 3}, "a is no object"),
        ({"a": {}}, "a has no shape"),
        ({"a": tensor(dtype=None)}, "dtype 'None'"),
        ({"a": tensor(dtype=["F32"])}, "dtype"),
        ([], "no JSON object"),
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        pytest.param(b"[" * 200_000, "not a whole", id="nested"),
    ],
)
def test_a_header_that_lies(tmp_path, header, message):
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=message) as caught:
        TensorFile(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: not a whole safetensors file (")
    assert "\n" not in said
    assert len(said) < 400


def test_a_pointer_of_git_lfs_is_called_so(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 14696792\n")
    with pytest.raises(ModelError, match=r"a pointer of Git LFS: `git lfs pull` fetches"):
        TensorFile(path)


@pytest.mark.parametrize("size", [9, 1 << 40, (1 << 64) - 1])
def test_a_header_that_is_longer_than_its_file(tmp_path, size):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + b"{}      ")
    with pytest.raises(ModelError, match=f"a header of {size} bytes in a file of 16"):
        TensorFile(path)


def test_a_header_of_any_length_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)  # takes no room
    with pytest.raises(ModelError, match="a header of 1073741824 bytes; at most 33554432"):
        TensorFile(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="it is not a regular file"):
        TensorFile(tmp_path / "model.safetensors")


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: a can't be read: the file ends"):
        file.read(torch.empty(1000), "a", 0, ())
    file.close()


@pytest.fixture(params=[0, 3], ids=["one-thread", "threads"])
def pieces(request):
    with ExitStack() as stack:
        threads = request.param and stack.enter_context(ThreadPoolExecutor(request.param))
        yield Pieces(threads or None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_columns_larger_than_pieces_are_read_and_cast(tmp_path, dtype, pieces):
    rows = PIECE_BYTES // 4 // 64 * 11 // 2
    stored = torch.arange(rows * 64).remainder(251).float().view(rows, 64)
    save_file({"x": torch.ones(3), "a": stored}, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors", pieces)
    whole, part = torch.empty(rows - 5, 64, dtype=dtype), torch.empty(rows, 9, dtype=dtype)
    file.read(whole, "a", 5, (64,))
    file.read(part, "a", 0, (64,), range(50, 59))
    file.close()
    assert torch.equal(whole, stored[5:].to(dtype))
    assert torch.equal(part, stored[:, 50:59].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_that_is_cut_while_it_is_read(tmp_path, dtype, pieces):
    path = tmp_path / "model.safetensors"
    count = PIECE_BYTES // 4 * 6
    save_file({"a": torch.ones(count)}, path)
    file = TensorFile(path, pieces)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"model\.safetensors: a can't be read: the file ends"):
        file.read(torch.empty(count, dtype=dtype), "a", 0, ())
    file.close()


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """A file with a few bytes, numbers of its header, or its end changed."""
    size = struct.unpack("<Q", raw[:8])[0]
    kind = rng.randrange(5)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    if kind == 1:
        return raw + bytes(rng.randrange(1, 20))
    if kind == 2:
        end = 8 + size if rng.random() < 0.8 else len(raw)
        changed = bytearray(raw)
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(end)] = rng.randrange(256)
        return bytes(changed)
    header = json.loads(raw[8 : 8 + size])
    about = header[rng.choice([name for name in header if name != "__metadata__"])]
    field = about[rng.choice(["shape", "data_offsets"])]
    odd = [0, 1, -1, 2**31, 2**62, 2**64, 1.5, None, "8", [], True, 10**400]
    if kind == 3 and field:
        field[rng.randrange(len(field))] = rng.choice(odd)
    else:
        about[rng.choice([*about, "more"])] = rng.choice([*odd, "F4", "F8_E8M0", "BF16", {}])
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new) if rng.random() < 0.9 else size) + new + raw[8 + size :]


def test_damaged_files_are_refused_or_read_without_harm(golden, tmp_path):
    """Whatever is accepted, all of its tensors can be read, and no bytes but the file's."""
    raw = (golden("llama").folder / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    rng = random.Random(14)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: list[str] = []
    for _ in range(EXAMPLES):
        path.write_bytes(damaged(rng, raw))
        try:
            file = TensorFile(path)
        except ModelError as error:
            refused.append(str(error))
            continue
        assert sum(entry.size for entry in file.entries.values()) <= path.stat().st_size
        for name, entry in file.entries.items():
            target = torch.empty(entry.size, dtype=torch.uint8)
            if entry.kind == "U8":
                file.read(target, name, 0, ())
        file.close()
    assert 0.5 * EXAMPLES < len(refused) < EXAMPLES
    assert not any("\n" in said or len(said) > 600 for said in refused)
    # Kilobytes: nothing was allocated for what a header only says.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
