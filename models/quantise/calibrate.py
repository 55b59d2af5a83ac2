"""What the inputs of a model's products are on a text: Σ x · xᵀ of each, some layers at a time.

The model is whole in memory, in its dense form; the sums are not: they would take more than it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tokenpod.kernels.backends import reference
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.compose import add_linear_of, norm_linear_of
from tokenpod.kernels.operations.ops import Linear, Operations
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.specs.layout import Layout

#: Tokens of a piece of text, if the model can address as many.
PIECE = 2048
#: Bytes that sums of several layers may take together.
_MOST_BYTES = 4 << 30


@dataclass
class _Sums:
    """Of the products that are listened to, by the name of their weight."""

    of: dict[str, torch.Tensor] = field(default_factory=dict)
    wanted: Collection[str] = ()

    def note(self, name: str, x: torch.Tensor) -> None:
        """X [T, in] is about to be multiplied."""
        if name in self.wanted:
            x = x.float()
            if name not in self.of:
                width = x.shape[1]
                self.of[name] = torch.zeros((width, width), device=x.device)
            self.of[name].addmm_(x.t(), x)


class Calibration:
    """A dense model that is run on a text again and again."""

    def __init__(
        self, checkpoint: Checkpoint, layout: Layout, tokens: Sequence[int], device: torch.device
    ) -> None:
        self._sums = _Sums()
        dtype = layout.spec.dtype or torch.float32
        dtype = torch.float32 if device.type == "cpu" else dtype
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=dtype,
            device=device,
            progress=lambda done, total: None,
        )
        names = {
            tensor.data_ptr(): name
            for name, tensor in weights.items()
            if isinstance(tensor, torch.Tensor)
        }
        self._model = Decoder(layout.spec, weights, _listening(self._sums, names))
        piece = min(PIECE, layout.spec.max_positions)
        self._pieces = [list(tokens[i : i + piece]) for i in range(0, len(tokens), piece)]
        self._pool = KVPool(slots=piece, layouts=layout.spec.kv_layouts, dtype=dtype, device=device)
        self._device = device

    def sums(self, widths: Mapping[str, int]) -> Iterator[dict[str, torch.Tensor]]:
        """Σ x · xᵀ [in, in] float32 by weight, of as many at a time as memory is meant for.

        `widths`: inputs of the weights that are asked for, in order.
        """
        batch: list[str] = []
        taken = 0
        for name, width in widths.items():
            size = 4 * width * width
            if batch and taken + size > _MOST_BYTES:
                yield self._run(batch)
                batch, taken = [], 0
            batch.append(name)
            taken += size
        if batch:
            yield self._run(batch)

    def _run(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        self._sums.of, self._sums.wanted = {}, set(names)
        for piece in self._pieces:
            self._model.forward(_prompt(piece, self._device), self._pool)
        return self._sums.of


def _listening(sums: _Sums, names: dict[int, str]) -> Operations:
    """The reference operations; products tell what they get. Norms and gates are apart."""
    plain = reference.OPERATIONS

    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        product, name = plain.prepare_linear(weight, bias), names.get(weight.data_ptr(), "")

        def linear(x: torch.Tensor) -> torch.Tensor:
            sums.note(name, x)
            return product(x)

        return linear

    return replace(
        plain,
        prepare_linear=prepare,
        prepare_norm_linear=norm_linear_of(prepare, plain.rms_norm, plain.act_mul),
        prepare_add_linear=add_linear_of(prepare),
    )


def _prompt(tokens: list[int], device: torch.device) -> ForwardBatch:
    """One row, whole, from slot 0 on."""
    count = len(tokens)
    places = torch.arange(count, device=device)
    return ForwardBatch(
        t_token=torch.tensor(tokens, device=device),
        t_place=places,
        t_slot=places,
        b_start=[0, count],
        b_context=[count],
        b_runs=[[(0, count)]],
        b_row=[0],
        row_table=places.to(torch.int32)[None],
        single_rows=0,
        logit_index=places,
    )


def tokens_of(folder: Path, text: Path, most: int) -> list[int]:
    """The first tokens of a text, by the model's tokenizer.json; ModelError if there are none."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no tokenizer.json, by which a text is calibrated with")
    try:
        # No token of any vocabulary is longer than 64 bytes on average.
        with text.open("rb") as file:
            content = file.read(64 * most).decode(errors="ignore")
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{text} can't be read by {path}: {error}") from None
    ids: list[int] = tokenizer.encode(content).ids[:most]
    if not ids:
        raise ModelError(f"{text} holds no text")
    return ids
