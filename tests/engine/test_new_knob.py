"""A sampling knob that nothing knows: these lines in five files, and every layer has it.

The lines are written into a copy of the tree, in which `PROOF` then runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("client", "core", "engine", "kernels", "models", "protos", "scheduler", "service", "src")

#: By file: a line that is there, and what comes behind it.
CHANGES = {
    "protos/tokenpod/v1/generation.proto": (
        "  optional float presence_penalty = 8;\n",
        """\
  // Subtracted from the logits of every token in the prompt. 0 to 100. Not set: 0.
  optional float prompt_penalty = 18;
""",
    ),
    "service/calls/call.py": (
        "    presence_penalty: float = 0.0\n",
        "    prompt_penalty: float = 0.0\n",
    ),
    "core/sampling.py": (
        "    bad_words: Annotated[list[list[int]], Knob(Stage.EDIT, stored=_all_tokens)] = []\n",
        "    prompt_penalty: Annotated[float, Knob(Stage.COUNT, 0, 100)] = 0.0\n",
    ),
    "engine/sampling/processors.py": (
        "        scores -= (out > 0) * presence\n",
        """\
    if penalty := float(columns["prompt_penalty"]):
        scores -= (prompt > 0) * penalty
""",
    ),
    "kernels/sampling/sampling_rows.py": (
        "    scores = tl.where(out > 0, scores - presence, scores)\n",
        """\
    penalty = real(words_ptr, tl.constexpr(TABLE.place("prompt_penalty"))).to(tl.float32)
    scores = tl.where(((counts >> 16) & MOST_COUNT) > 0, scores - penalty, scores)
""",
    ),
}

PROOF = """\
import asyncio

import torch
from support.sampling.samplers import on_cpu, on_device, random_logits, sampled, step

from tokenpod.core.sampling import SamplingParams
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import RequestLimits, check_generate
from tokenpod.service.calls.call import sampling_params
from tokenpod.service.dialects.tokenpod_v1.codec import generate_call
from tokenpod_client.protos.tokenpod.v1 import generation_pb2

LIMITS = RequestLimits(
    vocab_size=97,
    max_input_tokens=40,
    max_total_tokens=50,
    max_samples=1,
    max_stop_sequences=1,
    max_stop_sequence_bytes=8,
    max_top_n_tokens=5,
    max_logit_bias=3,
    max_constraint_bytes=100,
    slots=120,
    rows=3,
)


def asked(penalty):
    request = generation_pb2.GenerateRequest(text="x", sampling={"prompt_penalty": penalty})
    call = asyncio.run(generate_call(request, "", stream=True))
    check_generate(call, LIMITS)
    return sampling_params(call.sampling, seed=0)


# From a client's message to the engine's parameters, and its limits.
assert asked(50.0) == SamplingParams(prompt_penalty=50.0)
try:
    asked(100.5)
except InvalidArgument as refused:
    assert "sampling.prompt_penalty is 100.5; must be from 0 to 100" in str(refused), refused
else:
    raise AssertionError("not refused")

# Both samplers: rows with it beside rows without.
logits = random_logits(3, 97)
prompt = logits.topk(2).indices
rows = [
    (SamplingParams(prompt_penalty=50.0), {"prompt": prompt[0].tolist()}),
    (SamplingParams(), {"prompt": prompt[1].tolist()}),
    (sampled(prompt_penalty=0.5, presence_penalty=0.3, seed=7), {"prompt": prompt[2].tolist()}),
]
host = on_cpu(rows, 97).sample(logits.clone(), [0, 1, 2], [0, 0, 0])
assert host.tokens[0] == logits[0].topk(3).indices[2]
assert host.tokens[1] == logits[1].argmax()
device = step(on_device(rows, 97), logits)
assert torch.equal(device.tokens, host.tokens)
torch.testing.assert_close(device.logprobs, host.logprobs, rtol=0, atol=1e-5)
"""


def test_five_files_are_all_that_it_takes(tmp_path):
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("cli", "commands", "simulator", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, (line, more) in CHANGES.items():
        text = (tmp_path / name).read_text()
        assert text.count(line) == 1, name
        (tmp_path / name).write_text(text.replace(line, line + more))
    paths = [tmp_path / "src", ROOT / "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    if not Path("/dev/nvidiactl").exists():
        environment["TRITON_INTERPRET"] = "1"
    for command in ([str(tmp_path / "client" / "stubs.py")], ["-c", PROOF]):
        done = subprocess.run(
            [sys.executable, "-P", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr


def test_they_are_those_that_the_docs_name():
    section = (ROOT / "docs/extend.md").read_text().split("## Add a sampling knob")[1]
    section = section.split("\n## ")[0]
    assert len(CHANGES) == 5
    assert all(f"](../{name})" in section for name in CHANGES)
