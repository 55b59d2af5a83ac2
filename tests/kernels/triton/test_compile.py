"""Every kernel that serving launches compiles for the GPUs that we name, on a machine without one.

The interpreter that the other tests run kernels in takes Python that the compiler does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: Minutes of a processor; and a run on a GPU compiles all that it launches.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

#: A launch: the kernel, its grid, and arguments on lines of their own.
LAUNCH = re.compile(r"^ +(?:\w+\.)?(\w+)\[.*\]\($", re.MULTILINE)

#: What an older GPU gets otherwise than Hopper's: other tiles, no overlap, no tensor memory engine.
DIFFERENT = ["attend_plainly", "attend_whole_texts", "store", "multiply", "latents"]

#: Kernels of those.
AMPERES = {
    *("_attend", "_attend_whole", "_merge", "_store_key_value", "_rotate", "matrix"),
    "_attend_latent",
}


def compiler(capability: tuple[int, int], families: list[str]) -> subprocess.Popen[str]:
    """The process that compiles these families, or the usual ones."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(HERE / "compile_ahead.py"), *map(str, capability)]
    return subprocess.Popen(
        [*command, *families],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def compiled():
    """Capability -> the kernels that compiled for it, and what was said about others."""
    asked = ((9, 0), []), ((8, 0), DIFFERENT), ((8, 9), ["attend_8_bits"])
    running = {capability: compiler(capability, families) for capability, families in asked}
    return {capability: process.communicate() for capability, process in running.items()}


def test_all_that_is_launched_compiles_for_hopper(compiled):
    names, errors = compiled[9, 0]
    samplers = ROOT / "engine" / "gpu" / "device_sampler.py"
    sources = [*(ROOT / "kernels").rglob("*.py"), samplers]
    launched = {name for source in sources for name in LAUNCH.findall(source.read_text())}
    assert len(launched) > 20
    assert launched - set(names.split()) == set(), errors[-2000:]


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ((8, 0), AMPERES),
        ((8, 9), {"_attend", "_merge"}),
    ],
    ids=["8.0", "8.9"],
)
def test_what_differs_on_older_gpus_compiles_for_them(capability, kernels, compiled):
    names, errors = compiled[capability]
    assert kernels - set(names.split()) == set(), errors[-2000:]
    assert "does not compile" not in errors


def test_the_same_kernels_compile_for_rarer_arguments():
    process = compiler((9, 0), ["rarer"])
    names, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    assert {"_attend", "choose", "prepare", "multiply_rounded"} <= set(names.split())
