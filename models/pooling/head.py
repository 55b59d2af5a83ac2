"""What pools hidden states: the pieces of texts that a step has read, into vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn import functional

from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.specs.pooling_spec import Dense, Mode, PoolingSpec


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": _as_it_is,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(slots=True)
class TextSoFar:
    """A text of which steps have read some tokens."""

    #: Tokens in all, and those at its beginning that a mean leaves out.
    length: int
    left_out: int
    #: Vectors of tokens are asked for.
    tokens: bool
    #: A weight of each token is asked for, too.
    weights: bool = False
    #: [hidden] float32, of what has been read; or, piece by piece, [n, hidden].
    pooled: torch.Tensor | None = None
    pieces: list[torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PieceOfText:
    """Tokens of a step that go on with a text."""

    text: TextSoFar
    #: Position of the first, and the tokens of the step that they are.
    start: int
    first: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the text ends with it."""
        return self.start + self.end - self.first == self.text.length

    @property
    def counted(self) -> int:
        """The first of its tokens that a mean has."""
        return min(self.first + max(self.text.left_out - self.start, 0), self.end)


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A layer of a head, with its tensors in float32."""

    spec: Dense
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None
    norm_bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, columns] float32 -> [n, rows]."""
        x = ACTIVATIONS[self.spec.activation](functional.linear(x, self.weight, self.bias))
        if self.norm is None:
            return x
        return functional.layer_norm(
            x, self.norm.shape, self.norm, self.norm_bias, self.spec.norm_epsilon
        )


#: Tokens whose scores are made at a time: those of a long text over a large vocabulary would be
#: gigabytes.
_SCORED_AT_ONCE = 128


class PoolingHead:
    """Makes vectors of the hidden states of texts, in float32.

    Args:
        spec: how.
        layers: of the spec, with their tensors on the model's device.
        token_layers: the same of those of each token.
        word_layer: the same of what weighs tokens as words.
    """

    def __init__(
        self,
        spec: PoolingSpec,
        layers: Sequence[DenseWeights] = (),
        token_layers: Sequence[DenseWeights] = (),
        word_layer: DenseWeights | None = None,
    ) -> None:
        self.spec = spec
        self._word_layer = word_layer
        self._layers, self._token_layers = layers, token_layers

    def texts(self, hidden: torch.Tensor, pieces: Sequence[PieceOfText]) -> torch.Tensor:
        """Read pieces [n] of texts that one vector is asked of.

        Args:
            hidden: [T, hidden] of the step.
            pieces: one for each text.

        Returns:
            [m, width] float32: the vectors of those that end with their pieces, in their order.
        """
        states = self._reduced(hidden, pieces)
        done = [at for at, piece in enumerate(pieces) if piece.last]
        if len(done) < len(pieces) or any(piece.text.pooled is not None for piece in pieces):
            states = self._continued(states, pieces)
        device, vectors = hidden.device, states
        if len(done) < len(pieces):
            vectors = states.index_select(0, _sent(torch.tensor(done, dtype=torch.int64), device))
        if self.spec.mode in (Mode.MEAN, Mode.WEIGHTED_MEAN):
            counts = [self._weight(pieces[at].text) for at in done]
            vectors = vectors / _sent(torch.tensor(counts), device)[:, None]
        for layer in self._layers:
            vectors = layer(vectors)
        for _ in range(self.spec.logarithms):
            vectors = vectors.clamp_min(0).log1p()
        return functional.normalize(vectors) if self.spec.normalized else vectors

    def tokens(self, hidden: torch.Tensor, piece: PieceOfText) -> torch.Tensor | None:
        """Read a piece of a text whose tokens' vectors are asked for.

        Returns [length, hidden] float32 where the text ends with it.
        """
        text = piece.text
        # Of a text that goes on a copy: the next step may overwrite the states of this one.
        states = hidden[piece.first : piece.end].to(torch.float32, copy=not piece.last)
        text.pieces = [*(text.pieces or ()), states]
        if not piece.last:
            return None
        found = torch.cat(text.pieces)
        return functional.normalize(found) if self.spec.normalized else found

    def weights(self, hidden: torch.Tensor, piece: PieceOfText) -> torch.Tensor:
        """[length, 1] float32: what each token of a text weighs as a word, 0 or more.

        The text is an encoder's, which reads it in one piece (BGE-M3: Chen et al. 2024,
        arXiv 2402.03216).
        """
        assert self._word_layer is not None, "the model weighs no words"
        return self._word_layer(hidden[piece.first : piece.end].float())

    def _weight(self, text: TextSoFar) -> float:
        """What the sum of a text is divided by."""
        n = text.length
        if self.spec.mode is Mode.MEAN:
            return float(max(n - text.left_out, 1))
        return n * (n + 1) / 2 - text.left_out * (text.left_out + 1) / 2

    def _reduced(self, hidden: torch.Tensor, pieces: Sequence[PieceOfText]) -> torch.Tensor:
        """[n, hidden] float32: each piece by itself; sums where there are means."""
        mode = self.spec.mode
        if mode in (Mode.CLS, Mode.LAST_TOKEN):
            at = [piece.first if mode is Mode.CLS else piece.end - 1 for piece in pieces]
            return hidden.index_select(0, _sent(torch.tensor(at), hidden.device)).float()
        if mode is Mode.MAX:
            return torch.stack([self._highest(hidden[p.first : p.end]) for p in pieces])
        spans = [range(piece.counted, piece.end) for piece in pieces]
        whole = all(a.stop == b.start for a, b in pairwise(spans))
        if whole:
            rows = hidden[spans[0].start : spans[-1].stop].float()
        else:
            which = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            rows = hidden.index_select(0, _sent(which, hidden.device)).float()
        if mode is Mode.WEIGHTED_MEAN:
            weights = [
                torch.arange(p.start + span.start - p.first, p.start + span.stop - p.first) + 1
                for p, span in zip(pieces, spans, strict=True)
            ]
            rows = rows * _sent(torch.cat(weights), hidden.device)[:, None]
        lengths = _sent(torch.tensor([len(span) for span in spans]), hidden.device)
        return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True, initial=0)

    def _highest(self, states: torch.Tensor) -> torch.Tensor:
        """The highest of each number of the tokens of a piece, [n, hidden]: [width] float32."""
        if not self._token_layers:
            return states.float().amax(0)
        found = []
        for part in torch.split(states, _SCORED_AT_ONCE):
            x = part.float()
            for layer in self._token_layers:
                x = layer(x)
            found.append(x.amax(0))
        return torch.stack(found).amax(0)

    def _continued(self, states: torch.Tensor, pieces: Sequence[PieceOfText]) -> torch.Tensor:
        """With what was read of these texts before; noted of those that go on."""
        found = []
        for state, piece in zip(states, pieces, strict=True):
            before, mode = piece.text.pooled, self.spec.mode
            if before is None or mode is Mode.LAST_TOKEN:
                now = state
            elif mode is Mode.CLS:
                now = before
            else:
                now = torch.maximum(before, state) if mode is Mode.MAX else before + state
            piece.text.pooled = now
            found.append(now)
        return torch.stack(found)


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values of the host on a device, in the order of its queue and without waiting for it."""
    source = values.pin_memory() if device.type == "cuda" else values
    return source.to(device, non_blocking=True)


def pooling_head(
    spec: PoolingSpec, folder: Path, checkpoint: Checkpoint, device: torch.device
) -> PoolingHead:
    """The head of a spec, with its tensors: of the model's checkpoint, or of a folder in its own.

    Raises ModelError if one is missing, or of another shape.
    """

    def weights(layer: Dense) -> DenseWeights:
        if not layer.folder:
            return dense_weights(layer, _reader(checkpoint), device)
        path = folder / layer.folder
        own_file = path.suffix == ".safetensors"
        with Checkpoint(folder, layer.folder) if own_file else Checkpoint(path) as own:
            return dense_weights(layer, _reader(own), device)

    words = None if spec.word_layer is None else weights(spec.word_layer)
    layers, token_layers = ([*map(weights, each)] for each in (spec.layers, spec.token_layers))
    return PoolingHead(spec, layers, token_layers, words)


#: The tensor of the first of these names that there is.
_Read = Callable[..., torch.Tensor]


def _reader(checkpoint: Checkpoint) -> _Read:
    def read(*names: str) -> torch.Tensor:
        name = next((name for name in names if name and name in checkpoint), None)
        if name is None:
            raise ModelError(f"tensor {names[0]} is missing from the checkpoint")
        return checkpoint.read(name)

    return read


def dense_weights(spec: Dense, read: _Read, device: torch.device) -> DenseWeights:
    """A layer with its tensors, of which `read` finds the first by its names.

    Raises ModelError for a tensor of another shape.
    """

    def tensor(name: str, shape: tuple[int, ...], other: str = "") -> torch.Tensor:
        found = read(name, other)
        if spec.difference is not None:
            first, second = found.float()[list(spec.difference)]
            found = (first - second)[None]
        if found.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(found.shape)}; expected {list(shape)}")
        return found.to(device, torch.float32)

    def norm(kind: str) -> torch.Tensor | None:
        return None if spec.norm is None else tensor(f"{spec.norm}.{kind}", (spec.rows,))

    return DenseWeights(
        spec,
        tensor(spec.tensor("weight"), (spec.rows, spec.columns), spec.tied),
        tensor(spec.tensor("bias"), (spec.rows,), spec.other_bias) if spec.bias else None,
        norm("weight"),
        norm("bias") if spec.norm is not None and spec.bias else None,
    )
