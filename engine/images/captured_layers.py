"""A tower's layers as CUDA graphs: one per layer, for each of the last shapes of images.

    image 1  of a shape   layers are called as they are
    image 2               each is captured, and replayed, if `CapturePace` says so
    image 3 and later     each is replayed: one launch, where transformers makes 25 to 30

A graph reads what the layer before has left where that is; the first one's arguments are copied to
where it reads them. Layers of one image run one after the other, so all shapes share memory.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tokenpod.engine.gpu.graphs import record
from tokenpod.engine.images.capture_pace import CapturePace

if TYPE_CHECKING:
    from tokenpod.models.towers.tower import Tower

log = logging.getLogger("tokenpod.engine")

#: Of what shapes that are captured take on the device, besides memory that they share; and of that
#: what a graph takes, about.
MOST_BYTES, _GRAPH_BYTES = 256 << 20, 160 << 10


class _Input(NamedTuple):
    number: int


class _Left(NamedTuple):
    address: int


@dataclass(slots=True)
class _Layer:
    """A captured layer."""

    signature: Hashable
    run: Callable[[], Any]
    #: What it reads, in order: which of the shape's inputs, or where the layer before has left it.
    reads: list[_Input | _Left]


@dataclass(slots=True)
class _Shape:
    """The layers of images of one shape."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    #: Where the layers' common arguments are read.
    inputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return len(self.layers) * _GRAPH_BYTES + sum(each.nbytes for each in self.inputs)


class CapturedLayers:
    """Calls the layers of a tower, captured where their shapes have come before.

    What is on the host, and what is no tensor, belongs to the shape: a layer may act by it. So does
    nothing that lies on the device: a layer with integers there, which it may read, is called as it
    is. If a layer can't be captured, no further one is.

    Args:
        device: of the tower. (A CPU will do for tests: "replaying" calls the layer again.)
        pace: which shapes are captured.
        most_bytes: that these may take on the device; the one that came last is kept in any case.
    """

    def __init__(
        self,
        device: torch.device,
        pace: CapturePace | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._device, self._most_bytes = device, most_bytes
        self._pace = pace or CapturePace()
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._memory: Any = None
        self._works = True
        #: Of this image: its shape, if that is captured; whether it is with this image; layers that
        #: were called; what was copied where; and what the last layer left.
        self._shape: _Shape | None = None
        self._is_new = False
        self._called: set[int] = set()
        self._copied: dict[int, torch.Tensor] = {}
        self._left: set[int] = set()

    @property
    def shapes(self) -> list[_Shape]:
        """Those whose layers are captured, the one that came last at the end."""
        return [*self._shapes.values()]

    def begin(self) -> None:
        """A new image comes."""
        self._pace.begin()
        if self._is_new:
            taken = sum(shape.nbytes for shape in self.shapes)
            while taken > self._most_bytes and len(self._shapes) > 1:
                taken -= self._shapes.popitem(last=False)[1].nbytes
        self._shape, self._is_new = None, False
        self._called, self._copied, self._left = set(), {}, set()

    def call(
        self, at: int, forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What `forward(*args, **named)` of layer `at` yields, until the layer is called again."""
        leaves, form = tree_flatten((args, named))
        signature = self._signature(leaves, form) if self._works else None
        first, again = not self._called, at in self._called
        self._called.add(at)
        if first and signature is not None:
            self._shape = self._known(signature)
        # A layer's second result must not take the place of its first.
        if self._shape is None or signature is None or again:
            return forward(*args, **named)
        layer = self._shape.layers.get(at)
        if layer is None and not self._is_new:
            # An image failed half-way. What replayed layers leave is nobody's memory: to capture
            # another one might take it for what that computes with.
            return forward(*args, **named)
        if layer is None:
            began = time.perf_counter()
            made = self._captured(self._shape, at, signature, forward, leaves, form)
            self._pace.took(time.perf_counter() - began)
            return made
        if layer.signature != signature:
            return forward(*args, **named)
        for read, leaf in zip(layer.reads, filter(_is_read, leaves), strict=True):
            if isinstance(read, _Input):
                self._copy(read, leaf)
            elif read.address != leaf.data_ptr():
                return forward(*args, **named)
        return self._leave(layer.run())

    # -- details -------------------------------------------------------------------------------

    def _known(self, signature: Hashable) -> _Shape | None:
        """The shape of images whose first layer is called so, if it is captured, or is to be."""
        shape = self._shapes.get(signature)
        if shape is not None:
            self._shapes.move_to_end(signature)
        elif self._pace.worth(signature):
            shape = self._shapes[signature] = _Shape()
            self._is_new = True
        return shape

    def _captured(
        self,
        shape: _Shape,
        at: int,
        signature: Hashable,
        forward: Callable[..., Any],
        leaves: list[Any],
        form: Any,
    ) -> Any:
        """Capture a layer, and run it."""
        reads: list[_Input | _Left] = []
        placed = [*leaves]
        for where, leaf in enumerate(leaves):
            if not _is_read(leaf):
                continue
            if leaf.data_ptr() in self._left:
                reads.append(_Left(leaf.data_ptr()))
                continue
            read = self._input(shape, leaf)
            self._copy(read, leaf)
            placed[where] = shape.inputs[read.number]
            reads.append(read)
        args, named = tree_unflatten(placed, form)

        def step() -> Any:
            return forward(*args, **named)

        if self._device.type != "cuda":
            made = step()
            run = partial(_again, step, made)
            shape.layers[at] = _Layer(signature, run, reads)
            return self._leave(made)
        try:
            replay, self._memory = record(step, self._memory)
        except Exception:
            log.exception("layers of the image tower can't be captured: they are called one by one")
            self._works = False
            self._shapes.clear()
            return forward(*args, **named)
        made = replay()
        replay.let_go()  # who called has it, for as long as it is needed
        shape.layers[at] = _Layer(signature, replay, reads)
        return self._leave(made)

    def _leave(self, made: Any) -> Any:
        """Note where a layer has left what it made."""
        tensors = tree_flatten(made)[0]
        self._left = {each.data_ptr() for each in tensors if isinstance(each, torch.Tensor)}
        return made

    def _input(self, shape: _Shape, leaf: torch.Tensor) -> _Input:
        """Which of the shape's inputs a tensor is: a new one, unless it was copied already."""
        found = (number for number, source in self._copied.items() if source is leaf)
        number = next(found, len(shape.inputs))
        if number == len(shape.inputs):
            shape.inputs.append(torch.empty_like(leaf))
        return _Input(number)

    def _copy(self, read: _Input, leaf: torch.Tensor) -> None:
        """Copy it to where it is read, once for all layers: none changes what others read."""
        if self._copied.get(read.number) is not leaf:
            assert self._shape is not None
            self._shape.inputs[read.number].copy_(leaf)
            self._copied[read.number] = leaf

    def _signature(self, leaves: list[Any], form: Any) -> Hashable:
        """What a captured layer depends on; None: it can't be captured."""
        parts: list[Hashable] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, (int, float, str, type(None), torch.dtype)):
                    return None
                parts.append((type(leaf), leaf))
            elif _is_read(leaf):
                if leaf.device.type != self._device.type:
                    return None
                parts.append((leaf.dtype, *leaf.shape, leaf.stride()))
            elif leaf.device.type == "cpu":
                parts.append((leaf.dtype, *leaf.shape, leaf.numpy().tobytes()))
            else:
                return None
        return (str(form), *parts)


def _is_read(leaf: Any) -> bool:
    """Whether it is a tensor that layers compute with, and do not look at on the host."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.dtype is torch.bool)


def _again(step: Callable[[], Any], made: Any) -> Any:
    """What a graph does, on a CPU: the same numbers, or others, where they were before."""
    for place, numbers in zip(tree_flatten(made)[0], tree_flatten(step())[0], strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(numbers)
    return made


def capture_largest(tower: Tower, image: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Let a tower's layers be captured, those of its largest image first.

    What it needs for one, and graphs for theirs, is taken from then on.
    """
    tower.calls = CapturedLayers(device)
    for _ in range(3):  # called, captured, replayed
        tower(image)
