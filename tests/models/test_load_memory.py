"""What a load takes at its worst, by the kernel's count, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import load_peak

HIDDEN, INNER, LAYERS = 512, 2048, 8


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("quantize", "share"), [("int8", 2), pytest.param("int4", 4, marks=pytest.mark.slow)]
)
@pytest.mark.pod
def test_weights_made_while_loading_take_little_more_than_they_keep(tmp_path, quantize, share):
    """The quantised model, a tenth more, and the largest tensor as it is stored."""
    small, large = tmp_path / "small", tmp_path / "large"
    load_peak.write(small, 64, 128, 1)
    load_peak.write(large, HIDDEN, INNER, LAYERS)
    done = subprocess.run(
        [sys.executable, "-P", Path(load_peak.__file__), small, large, quantize],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, peak, kept = map(int, done.stdout.split())
    assert (1 << 26) / share < model < 1.1 * (1 << 26) / share
    once = 1 << 20  # whatever the model
    assert peak <= 1.1 * model + 2 * HIDDEN * INNER + once
    assert kept <= 1.1 * model + once
