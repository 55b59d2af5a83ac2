"""Products are given the step, and may start from what an adapter adds to some of its tokens."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.adapter_ops import AdapterWeights, Added
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import LinearWeight
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.layers.linear import Products


@pytest.mark.parametrize("name", ["llama-biases", "opt-350m", "gemma2", "gpt-neox"])
def test_a_delta_on_one_row_changes_that_row_alone(name, golden, load_folder, schedule, text):
    folder = golden(name).folder
    seen: set[str] = set()

    def on_first_row(weight, step):
        seen.add(weight)
        if step is None or weight == "head":
            return None
        outputs, inputs = shapes[weight]
        down, up = torch.zeros(1, 1, 1, inputs), torch.zeros(1, 1, outputs)
        t_adapter = torch.zeros(step.b_start[-1], dtype=torch.int64)
        t_adapter[step.b_start[0] : step.b_start[1]] = 1
        plan = reference.plan_adapters(t_adapter, torch.zeros(1, dtype=torch.int32))
        bias = torch.full((1, outputs), 0.5)
        weights = AdapterWeights(down, up, bias, rows=(outputs,))
        return Added(weights, plan, reference.adapt)

    plain = load_folder(folder)
    shapes = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenpod.models.load.Decoder", recording(shapes, on_first_row))
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


def recording(shapes, delta):
    """A decoder with this delta, that notes the shape of each weight."""

    def make(config, weights, ops, **more):
        shapes.update({name: w.shape for name, w in weights.items() if w.ndim == 2})
        return Decoder(config, weights, ops, delta=delta, **more)

    return make


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("llama", ["norm_linear", "store_key_value", "attention", "add_linear"]),
        ("qwen3", ["norm_linear", "store_key_value", "attention", "add_linear"]),
        ("phi3", ["norm_linear", "store_key_value", "attention", "add_linear"]),
    ],
)
def test_norms_and_sums_are_part_of_products_where_they_can_be(
    name, layer, golden, load_folder, schedule, text
):
    """A layer of Llama's shape is six operations: what is fused on a GPU is asked for as one."""
    calls: list[str] = []

    def noted(name, operation):
        def call(*args, **named):
            calls.append(name)
            return operation(*args, **named)

        return call

    def recording(device):
        ops = reference.OPERATIONS
        found = {field.name: getattr(ops, field.name) for field in fields(ops)}
        plain = {n: noted(n, op) for n, op in found.items() if op and not n.startswith("prepare")}
        made = {
            n: lambda *args, n=n, op=op: noted(n.removeprefix("prepare_"), op(*args))
            for n, op in found.items()
            if op and n.startswith("prepare")
        }
        return replace(ops, **plain, **made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenpod.models.load.operations_for", recording)
        scheduler = schedule(load_folder(golden(name).folder))
    scheduler.step([(scheduler.sequence(text(3)), 3)])
    inner = [*layer, "norm_linear", "add_linear"]
    # The first layer asks for the plan and the rotation; then the layers, the last norm, the head.
    assert calls == ["embed", "plan_attention", "rotate", *inner * 3, "rms_norm", "linear"]


def test_a_weight_in_another_layout_is_held_once_however_many_products_are_made_of_it():
    """With adapters there are two of one weight: fused, and plain for what adapters finish."""
    from tokenpod.kernels.backends import triton
    from tokenpod.kernels.products.formats.int4 import Int4Weight
    from tokenpod.kernels.products.quantised import lanes

    weight = Int4Weight.made_of(torch.randn(64, 128))
    weights = {"up": LinearWeight((weight,)), "embedding": torch.zeros(1)}
    made = []
    products = Products(triton.OPERATIONS, weights, delta=lambda name, step: None)
    with pytest.MonkeyPatch.context() as patch:
        before = lanes._of_int4
        patch.setattr(lanes, "_of_int4", lambda *given: made.append(before(*given)) or made[-1])
        products.norm_linear("up", RowNorm(torch.ones(128), 1e-5), Activation.SILU)
    assert len(made) == 1
    assert made[0] is not None
