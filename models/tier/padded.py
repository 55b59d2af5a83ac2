"""A model that transformers computes with a cache of its own: recurrent, hybrid, with an encoder.

Prompts run row by row. Rows that decode run together in a batch, padded at the left, as far as the
class can; `check_padded` finds that out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.halves import Halves
from tokenpod.models.tier.model import TransformersModel
from tokenpod.models.tier.spec import TierSpec
from tokenpod.models.tier.states import Batch, RowStates

#: What classes call their cache.
_CACHES = ("past_key_values", "cache_params", "state")


class Together(Enum):
    """Which rows can decode in one batch."""

    #: All: states are as large whatever the length.
    ANY = auto()
    #: Those of about the same length: at most half of a batch is padding.
    PADDED = auto()
    #: Those of one length.
    ALIKE = auto()
    #: None.
    ALONE = auto()

    def key(self, row: int, length: int, encoded: int) -> tuple[int, ...]:
        """Equal for rows that can be together."""
        if self is Together.ANY:
            return ()
        if self is Together.PADDED:
            return (length.bit_length(), encoded.bit_length())
        return (length, encoded) if self is Together.ALIKE else (row,)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a class does rightly."""

    together: Together
    #: Whether several tokens can follow a cache; else their text is computed anew.
    continues: bool


class Cached:
    """transformers' model, and its cache.

    Args:
        halves: the model.
        start: the decoder's first token, if it has an encoder.

    Raises:
        NotServed: its class has no cache by a name that is known.
    """

    def __init__(self, halves: Halves, start: int | None) -> None:
        self.halves = halves
        self.encodes = halves.encoder is not None
        self.start = start
        name = next((name for name in _CACHES if name in halves.arguments), None)
        if name is None:
            raise NotServed("its base model takes no cache")
        self._name = name
        self._numbered = "position_ids" in halves.arguments
        self._masked = "attention_mask" in halves.arguments
        #: Whether states grow with texts, so that those of a batch are padded.
        self.grows = True

    def whole(self, tokens: torch.Tensor | None, prompt: int) -> tuple[torch.Tensor, Any]:
        """A text from its beginning: [n] tokens -> [m, hidden] of its last positions, its state.

        Of a model with an encoder the first m - 1 positions of the prompt have none.
        """
        assert tokens is not None
        state: dict[str, Any] = {}
        if self.encodes:
            state["encoder"] = self.halves.encode(tokens[None, :prompt])
            tokens = torch.cat((tokens.new_tensor([self.start]), tokens[prompt:]))
        batch = Batch([0], [0], [prompt], state)
        hidden = self.further(tokens[None], batch)
        return hidden[0], batch.state

    def further(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[B, n] tokens after what the batch has -> [B, n, hidden]; the batch has them then."""
        device, count = tokens.device, tokens.shape[1]
        named: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
        if "cache" in batch.state:
            named[self._name] = batch.state["cache"]
        if self._numbered:
            before = torch.tensor(batch.lengths, device=device)[:, None]
            named["position_ids"] = before + torch.arange(count, device=device)
        if self.grows and min(batch.lengths) < max(batch.lengths):
            if not self._masked:
                raise NotServed("its base model takes no mask")
            named["attention_mask"] = _mask(batch.lengths, count, device)
        if self.encodes:
            named["encoder_hidden_states"] = batch.state["encoder"]
            if min(batch.encoded) < max(batch.encoded):
                named["encoder_attention_mask"] = _mask(batch.encoded, 0, device)
        output = self.halves.run(**named)
        cache = output.get(self._name)
        if cache is None:
            raise NotServed("its base model returns no cache")
        batch.state["cache"] = cache
        batch.lengths = [length + count for length in batch.lengths]
        hidden: torch.Tensor = output[0]
        return hidden


def _mask(lengths: list[int], count: int, device: torch.device) -> torch.Tensor:
    """[B, longest + count] int64: 1 where there is a token, at the right."""
    width = max(lengths)
    padding = width - torch.tensor(lengths, device=device)
    places = torch.arange(width + count, device=device)
    return (places >= padding[:, None]).long()


class PaddedModel(TransformersModel):
    """Rows with caches of transformers; see `TransformersModel` for the other arguments.

    Args:
        cached: the model.
        can: what its class does rightly.
    """

    pool_class = RowStates

    def __init__(
        self,
        spec: TierSpec,
        cached: Cached,
        ops: Operations,
        can: Abilities,
        unused: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(spec, cached.halves, ops, unused)
        self._cached = cached
        self.can = can

    def _hidden(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        assert isinstance(pool, RowStates)
        hidden: list[torch.Tensor | None] = [None] * batch.rows
        decoding: dict[int, int] = {}
        for at, number in enumerate(batch.b_row):
            row, new = pool.rows[number], batch.t_token[batch.b_start[at] : batch.b_start[at + 1]]
            row.length += len(new)
            if not self._goes_on:
                row.tokens = new.clone() if row.tokens is None else torch.cat((row.tokens, new))
            if len(new) == 1 and row.batch is not None:
                decoding[number] = at
            else:
                hidden[at] = self._prompt(pool, number, new)
        for rows in self._groups(pool, decoding):
            together = pool.together(rows)
            places = [decoding[number] for number in together.rows]
            index = torch.tensor([batch.b_start[at] for at in places], device=self._device)
            out = self._cached.further(batch.t_token.index_select(0, index)[:, None], together)
            for at, one in zip(places, out, strict=True):
                hidden[at] = one
        return torch.cat([one for one in hidden if one is not None])

    @property
    def _goes_on(self) -> bool:
        """Whether the pieces of a prompt are computed one after another."""
        return self.can.continues and not self._cached.encodes

    def _groups(self, pool: RowStates, decoding: dict[int, int]) -> Iterator[list[int]]:
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number in decoding:
            row = pool.rows[number]
            encoded = row.prompt if self._cached.encodes else 0
            found[self.can.together.key(number, row.length, encoded)].append(number)
        yield from found.values()

    def _prompt(self, pool: RowStates, number: int, new: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of a row's n new tokens: the next piece of what it needs computed."""
        row = pool.rows[number]
        if row.batch is not None and self._goes_on:
            return self._cached.further(new[None], pool.together([number]))[0]
        row.batch = None  # its memory, before there is more
        if self._cached.encodes and row.length < row.prompt:
            # The encoder reads prompts whole: nothing is known before their last piece.
            return self._nothing(len(new))
        hidden, state = self._cached.whole(new if self._goes_on else row.tokens, row.prompt)
        if not self._cached.encodes:
            row.batch = Batch([number], [row.length], [0], state)
        else:
            row.batch = Batch([number], [row.length - row.prompt + 1], [row.prompt], state)
        if len(hidden) < len(new):
            hidden = torch.cat((self._nothing(len(new) - len(hidden)), hidden))
        return hidden[-len(new) :]

    def _nothing(self, count: int) -> torch.Tensor:
        """[count, hidden] of tokens that nothing is asked of."""
        width = self.config.hidden_size
        return torch.zeros((count, width), dtype=self._dtype, device=self._device)
