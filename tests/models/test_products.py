"""Products are given the step, and may start from what an adapter adds to some of its tokens."""

from __future__ import annotations

import pytest
import torch

from tokenpod.models.decoder import Decoder


@pytest.mark.parametrize("name", ["llama-biases", "opt-350m", "gemma2", "gpt-neox"])
def test_a_delta_on_one_row_changes_that_row_alone(name, golden, load_folder, schedule, text):
    folder = golden(name).folder
    seen: set[str] = set()

    def on_first_row(weight, x, step):
        seen.add(weight)
        if step is None or weight == "head":
            return None
        out = sizes[weight]
        delta = torch.zeros(len(x), out)
        delta[step.b_start[0] : step.b_start[1]] = 0.5
        return delta

    plain = load_folder(folder)
    sizes = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenpod.models.load.Decoder", recording(sizes, on_first_row))
        adapted = load_folder(folder)
    first, second = text(9), text(7, seed=1)
    results = []
    for model in (plain, adapted):
        scheduler = schedule(model)
        rows = [(scheduler.sequence(first), 9), (scheduler.sequence(second), 7)]
        results.append(scheduler.step(rows))
    (own, other), (own_changed, other_changed) = results
    torch.testing.assert_close(other_changed, other, rtol=0, atol=1e-5)
    assert (own_changed - own).abs().max() > 0.1
    assert {"0.qkv", "2.output", "1.up", "0.down", "head"} <= seen


def recording(sizes, delta):
    """A decoder with this delta, that notes how long each weight's outputs are."""

    def make(config, weights, ops, **more):
        sizes.update({name: len(w) for name, w in weights.items() if w.ndim == 2})
        return Decoder(config, weights, ops, delta=delta, **more)

    return make
