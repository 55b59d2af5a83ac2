"""What a layer of a model is, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import torch

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.layer_tensors import LayerTensors, Rows, plain_weight, times
from tokenpod.models.layers.mixer import Mixer
from tokenpod.models.layers.norms import Norm
from tokenpod.models.weights.names import ExpertNames, Fused
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division, Source, Stack, Weight


class Same(Enum):
    """The type of `SAME`."""

    SAME = "same"


#: As the MLP's norm: it reads what the attention reads.
SAME: Final = Same.SAME


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(up(x))), or down(activation(gate(x)) · up(x))."""

    width: int
    activation: Activation
    gated: bool
    up_bias: bool = False
    down_bias: bool = False
    #: Multiply gates, and what the last product says.
    gate_scale: float = 1.0
    down_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise ModelError for gates that can't be multiplied."""
        if self.gate_scale != 1.0 and (self.up_bias or not self.gated):
            raise ModelError("mlp.gate_scale needs gates without a bias")

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """Its products, `up` with gates first, and `down`."""
        return self.named_weights(tensors, "", tensors.names.up, tensors.names.down)

    def named_weights(
        self, tensors: LayerTensors, name: str, up: tuple[str, ...] | Fused, down: str
    ) -> Iterator[Weight]:
        """The same, whose names begin with `name`, of these tensors."""
        width = Axis(self.width, Division.EVEN)
        rows: list[Rows] = [(width, None)] * (2 if self.gated else 1)
        for weight in tensors.stacked(f"{name}up", up, rows, 1, self.up_bias):
            gates, *others = weight.sources
            yield replace(weight, sources=(times(gates, self.gate_scale), *others))
        last = down, tensors.hidden, width
        yield from tensors.product(f"{name}down", *last, self.down_bias, self.down_scale)

    def problem(self, world: int) -> str | None:
        """Why so many ranks can't divide it, as the beginning of a sentence."""
        return _undivided(self.width, "features of a feed-forward block", world)

    def on_rank(self, shard: Shard) -> Mlp:
        """With a rank's features."""
        return replace(self, width=self.width // shard.world)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of blocks of `width` features each."""

    count: int
    width: int
    activation: Activation
    routing: Routing
    #: Of the router's product.
    router_bias: bool = False
    #: A number per expert, added to its score when experts are chosen, not when they are weighed.
    correction: bool = False
    #: In both products of each expert.
    biases: bool = False
    #: Each expert has gates.
    gated: bool = True
    #: Features of what experts read and add to, between two products with the stream's; None: they
    #: read and add to the stream itself.
    inner: int | None = None
    #: A block that works for every token, and is added to what the chosen ones say.
    shared: Mlp | None = None
    #: What it says is multiplied by the sigmoid of a product with one output.
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Raise ModelError for a choice that can't be made."""
        routing = self.routing
        size = self.count // routing.groups
        if self.count % routing.groups or not 1 <= routing.chosen_groups <= routing.groups:
            raise ModelError(
                f"{self.count} experts in {routing.groups} groups, {routing.chosen_groups} of them "
                "chosen: groups are of equal size, and at most all are chosen"
            )
        if not routing.per_token <= size * routing.chosen_groups or routing.group_best > size:
            raise ModelError(
                f"{routing.per_token} experts per token: {routing.chosen_groups} groups of {size} "
                "have too few"
            )
        if routing.score is Score.SPARSEMIXER and routing.per_token != 2:
            raise ModelError(f"{routing.per_token} experts per token: sparsemixer chooses 2")
        if self.shared_gate and (self.shared is None or self.shared.down_bias):
            raise ModelError("experts.shared_gate needs a shared block without a bias at its end")
        if self.inner is not None and self.shared_gate:
            raise ModelError("experts.shared_gate: experts add to the stream itself")
        if not self.gated and self.activation is Activation.SWIGLU_CLAMPED:
            raise ModelError("experts.activation is one of gates")

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """The router, all experts' products, and what there is for every token."""
        names, at, count, hidden = tensors.names.experts, tensors.at, self.count, tensors.hidden
        assert names is not None, "a family with experts names them"
        width, seen = Axis(self.width, Division.EVEN), hidden
        if self.inner is not None:
            seen = Axis(self.inner)
            yield from tensors.product("experts_in", names.inner_in, seen, hidden, False)
            yield from tensors.product("experts_out", names.inner_out, hidden, seen, False)
        weights = {
            "gate_up": ((names.gate, names.up) if self.gated else (names.up,), (width, seen)),
            "down": ((names.down,), (seen, width)),
        }
        yield plain_weight("experts.router", at + names.router, Axis(count), hidden)
        for name, (stored, axes) in weights.items():
            each = tuple(t.source(at, e, count, axes) for e in range(count) for t in stored)
            yield Weight(f"experts.{name}", each, experts=count)
            if self.biases:
                rows = axes[0]
                each = tuple(
                    t.bias_source(at, e, count, rows) for e in range(count) for t in stored
                )
                yield Weight(f"experts.{name}_bias", each, experts=count)
        yield from self._router_biases(at, names)
        if self.shared is not None:
            own = names.shared_up, names.shared_down
            yield from self.shared.named_weights(tensors, "shared_", *own)
        if self.shared_gate:
            yield plain_weight("shared_gate", at + names.shared_gate, Axis(1), hidden)

    def _router_biases(self, at: str, names: ExpertNames) -> Iterator[Weight]:
        """In float32: rounding does not choose."""
        rows = Axis(self.count)
        if self.router_bias:
            source = Source(f"{at}{names.router}.bias", (rows,))
            yield Weight("experts.router_bias", (source,), dtype=torch.float32)
        if self.correction:
            stack = Stack(0, 1) if names.correction_rows else None
            source = Source(at + names.correction, (rows,), stack=stack)
            yield Weight("experts.correction", (source,), dtype=torch.float32)

    def problem(self, world: int) -> str | None:
        """Why so many ranks can't divide it, as the beginning of a sentence."""
        problem = _undivided(self.width, "features of an expert", world)
        if problem is None and self.shared is not None:
            problem = _undivided(self.shared.width, "features of the shared experts", world)
        return problem

    def on_rank(self, shard: Shard) -> Experts:
        """With a rank's features of each expert."""
        shared = self.shared and self.shared.on_rank(shard)
        return replace(self, width=self.width // shard.world, shared=shared)


def _undivided(count: int, what: str, world: int) -> str | None:
    return f"{count} {what} can't be divided among {world} ranks" if count % world else None


@dataclass(frozen=True, slots=True)
class Norms:
    """`_in` norms read the stream, `_out` norms what a branch adds to it.

    Under `Join.POST_NORM` an `_out` norm is applied to the sum instead.
    """

    attention_in: Norm | None = None
    attention_out: Norm | None = None
    mlp_in: Norm | Same | None = None
    mlp_out: Norm | None = None


class Join(Enum):
    """How a layer's two branches meet the stream."""

    #: The attention's result is added, then the MLP reads the sum.
    SEQUENTIAL = "sequential"
    #: Both read the same, and both results are added.
    PARALLEL = "parallel"
    #: As SEQUENTIAL, and each sum is normed.
    POST_NORM = "post_norm"


@dataclass(frozen=True, slots=True)
class PerLayer:
    """A third branch: norm(out(activation(gate(x)) · the token's embedding of this layer))."""

    #: Features of that embedding.
    width: int
    activation: Activation
    norm: Norm


#: What the names of a second mixer's weights begin with, behind the layer's number.
BESIDE = "beside."


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward block, or one of them alone."""

    mixer: Mixer | None
    mlp: Mlp | Experts | None
    norms: Norms
    join: Join = Join.SEQUENTIAL
    #: Multiplies what each branch adds to the stream.
    branch_scale: float = 1.0
    per_layer: PerLayer | None = None
    #: The stream behind the layer is multiplied by a number that the checkpoint has.
    scaled: bool = False
    #: A second mixer, which reads what the first reads; both results are added.
    beside: Mixer | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for branches that can't be joined like that."""
        if (self.mixer is None or self.mlp is None) and self.join is not Join.SEQUENTIAL:
            raise ModelError(f"join {self.join.value}: the layer has one branch")
        if self.beside is not None:
            plain = self.join is Join.SEQUENTIAL and self.branch_scale == 1.0
            if self.mixer is None or not plain or self.norms.attention_out is not None:
                raise ModelError("beside: two mixers end in the stream as they are")
        if self.norms.mlp_in is SAME and self.join is not Join.PARALLEL:
            raise ModelError(
                f"norms.mlp_in is SAME, and join {self.join.value}: it is not parallel"
            )
        if isinstance(self.mlp, Experts) and not isinstance(self.norms.mlp_in, Norm):
            raise ModelError("norms.mlp_in: a mixture of experts has a norm of its own")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All that it has."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)

    def weights(self, tensors: LayerTensors) -> Iterator[Weight]:
        """All of the layer, without its number."""
        norms, names = self.norms, tensors.names

        def norm(name: str, norm: Norm | None, stored: str) -> Iterator[Weight]:
            return tensors.norm(name, norm, stored, tensors.hidden)

        yield from norm("attention_in", norms.attention_in, names.attention_in)
        if self.mixer is not None:
            yield from self.mixer.weights(tensors)
        if self.beside is not None:
            for weight in self.beside.weights(tensors):
                yield replace(weight, name=f"{BESIDE}{weight.name}")
        yield from norm("attention_out", norms.attention_out, names.attention_out)
        if not isinstance(norms.mlp_in, Same):
            yield from norm("mlp_in", norms.mlp_in, names.mlp_in)
        if self.mlp is not None:
            yield from self.mlp.weights(tensors)
        yield from norm("mlp_out", norms.mlp_out, names.mlp_out)
        if self.per_layer is not None:
            own, width = names.per_layer, Axis(self.per_layer.width)
            yield from tensors.product("per_layer_gate", own.gate, width, tensors.hidden, False)
            yield from tensors.product("per_layer_out", own.output, tensors.hidden, width, False)
            yield from norm("per_layer_norm", self.per_layer.norm, own.output_norm)
        if self.scaled:
            yield tensors.single("layer_scale", names.layer_scale, Axis(1))

    def problem(self, world: int) -> str | None:
        """Why so many ranks can't divide it, as the beginning of a sentence."""
        parts = (*self.mixers, *(() if self.mlp is None else (self.mlp,)))
        return next(filter(None, (part.problem(world) for part in parts)), None)

    def on_rank(self, shard: Shard) -> LayerSpec:
        """With a rank's heads and features."""
        return replace(
            self,
            mixer=self.mixer and self.mixer.on_rank(shard),
            mlp=self.mlp and self.mlp.on_rank(shard),
            beside=self.beside and self.beside.on_rank(shard),
        )
