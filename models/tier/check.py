"""The check that a model passes before it is served through transformers.

A family may ignore the attention function, number tokens by itself, or keep a state beside keys
and values. Its text would be wrong without any error. So a short text is computed in four ways,
whose logits must be equal: by transformers alone; by us in one step; in pieces, in steps that
another text shares; and token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.model import TransformersModel

#: Of the text, and of the piece that is computed first.
TOKENS, FIRST = 24, 11
#: Of the text that is computed beside it.
OTHER = 7
#: How far logits of one token may differ, relative to their spread, by bytes of a number: rounding
#: of half the size in every layer, and experts that it chooses, leave the median far below.
TOLERANCE = {4: 1e-3, 2: 0.15}

#: How many times the noise is rounding too, and how much is no noise.
NOISES, MOST_NOISE = 3.0, 0.5


@dataclass
class _Text:
    """One of the check's texts: where its keys and values lie, and how far it is."""

    row: int
    tokens: torch.Tensor
    first_slot: int
    done: int = 0


def check(
    model: TransformersModel, expected: torch.Tensor, tokens: torch.Tensor, noise: float = 0.0
) -> None:
    """Raise NotServed, with what was seen, unless the model says in steps what it says at once.

    Args:
        model: with our attention.
        expected: [TOKENS, vocabulary]: logits by transformers' own attention.
        tokens: [TOKENS] int64, on the model's device.
        noise: what rounding does to logits, seen between two ways of transformers.
    """
    steps = Steps(model, tokens)
    whole = steps.whole()
    ways = {
        "in one step": (whole, expected, "than by transformers' own attention"),
        "in pieces, beside another text": (steps.in_pieces(), whole, "than in one step"),
        "token by token": (steps.singly(), whole, "than in one step"),
    }
    why = "it keeps something else than keys and values, or does not leave attention to the "
    for way, (got, wanted, than) in ways.items():
        compare(model.dtype, noise, got, wanted, f"{way} {than}", why + "attention function")


def check_text(
    vocabulary: int, padding: int | None, device: torch.device, length: int = TOKENS
) -> torch.Tensor:
    """[length] int64: many tokens of a vocabulary, none of which is for padding."""
    tokens = torch.arange(length, device=device) * 7919 % vocabulary
    return tokens if padding is None else torch.where(tokens == padding, padding + 1, tokens)


def compare(
    dtype: torch.dtype, noise: float, got: torch.Tensor, wanted: torch.Tensor, way: str, why: str
) -> None:
    """Raise NotServed if logits that came one way are not, but for rounding, those wanted."""
    limit = TOLERANCE[dtype.itemsize] + min(NOISES * noise, MOST_NOISE)
    error = difference(got, wanted)
    if not error <= limit:
        raise NotServed(
            f"its logits are others {way} (by {error:.2g} of their spread; at most {limit:g}): "
            f"{why}"
        )


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The median over tokens of how far logits are from what they should be; NaN if they are."""
    got, wanted = got.double(), wanted.double()
    spread = (wanted - wanted.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    off = (got - wanted).square().mean(-1).sqrt()
    if not got.isfinite().all():
        return float("nan")
    return float((off / spread.clamp(min=1e-30)).median())


class Steps:
    """The ways to compute a text, each over fresh slots, and rows, of one pool.

    Args:
        model: with its operations.
        tokens: [TOKENS] int64.
        prompt: how many of them are a prompt.
    """

    def __init__(
        self, model: TransformersModel, tokens: torch.Tensor, prompt: int = TOKENS
    ) -> None:
        self._model, self._tokens, self._prompt = model, tokens, prompt
        room = 6 * max(TOKENS, len(tokens))
        self._pool = model.pool_class(
            layouts=model.config.kv_layouts, slots=room, dtype=model.dtype, device=tokens.device
        )
        self._used = 0
        self._texts: list[_Text] = []

    def whole(self) -> torch.Tensor:
        """[TOKENS, vocabulary]."""
        return self._run((self._text(self._tokens), TOKENS))[0]

    def in_pieces(self) -> torch.Tensor:
        """The last tokens of the text, after some that were computed beside another text."""
        text, other = self._text(self._tokens), self._text(self._tokens[:OTHER].flip(0))
        first = self._run((text, FIRST), (other, OTHER - 1))[0]
        return torch.cat([first, self._run((other, 1), (text, TOKENS - FIRST))[1]])

    def singly(self) -> torch.Tensor:
        """One token per step."""
        text = self._text(self._tokens)
        return torch.cat([self._run((text, 1))[0] for _ in range(TOKENS)])

    def beside(self, ahead: int) -> torch.Tensor:
        """[TOKENS - FIRST, vocabulary]: one token per step, beside one of a longer text."""
        text = self._text(self._tokens)
        longer = torch.cat((self._tokens, self._tokens))[-TOKENS - ahead :].flip(0)
        other = self._text(longer, self._prompt + ahead // 2)
        self._run((text, FIRST))
        self._run((other, FIRST + ahead))
        return torch.cat([self._run((text, 1), (other, 1))[0] for _ in range(TOKENS - FIRST)])

    def far_apart(self, short: int, follow: int) -> list[torch.Tensor]:
        """[follow, vocabulary] of the text and of its first `short` tokens, each one's last.

        They follow prompts one token per step, both texts in one batch.
        """
        both = self._tokens, self._tokens[:short]
        texts = [self._text(tokens, len(tokens) - follow) for tokens in both]
        for text in texts:
            self._run((text, len(text.tokens) - follow))
        steps = [self._run(*((text, 1) for text in texts)) for _ in range(follow)]
        return [torch.cat(each) for each in zip(*steps, strict=True)]

    def _text(self, tokens: torch.Tensor, prompt: int | None = None) -> _Text:
        text = _Text(row=len(self._texts), tokens=tokens, first_slot=self._used)
        self._pool.take_row(text.row, prompt or self._prompt)
        self._used += len(tokens)
        self._texts.append(text)
        return text

    def _run(self, *works: tuple[_Text, int]) -> list[torch.Tensor]:
        """Process so many tokens of each; rows of one token first."""
        batch = _batch(works, self._texts, self._tokens.device)
        logits = self._model.logits(self._model.forward(batch, self._pool))
        for text, count in works:
            text.done += count
        return list(torch.split(logits, [count for _, count in works]))


def _batch(
    works: Sequence[tuple[_Text, int]], texts: Sequence[_Text], device: torch.device
) -> ForwardBatch:
    ends = [text.done + count for text, count in works]
    position = torch.cat([torch.arange(e - n, e) for e, (_, n) in zip(ends, works, strict=True)])
    slot = torch.cat(
        [torch.arange(e - n, e) + text.first_slot for e, (text, n) in zip(ends, works, strict=True)]
    )
    token = torch.cat([text.tokens[text.done : text.done + n] for text, n in works])
    longest = max(len(text.tokens) for text in texts)
    table = torch.stack([torch.arange(longest) + text.first_slot for text in texts]).int()
    rows = [text.row for text, _ in works]
    starts = [0, *torch.tensor([n for _, n in works]).cumsum(0).tolist()]
    on_device = device.type != "cpu"
    return ForwardBatch(
        t_token=token,
        t_place=position.to(device),
        t_slot=slot.to(device),
        b_start=starts,
        b_context=ends,
        b_runs=[[(t.first_slot, t.first_slot + e)] for e, (t, _) in zip(ends, works, strict=True)],
        b_row=rows,
        row_table=table.to(device),
        single_rows=sum(n == 1 for _, n in works),
        logit_index=None,
        paged=_paged(rows, starts, ends, device) if on_device else None,
    )


def _paged(
    rows: list[int], starts: list[int], contexts: list[int], device: torch.device
) -> PagedRows:
    row, begin, context = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in (rows, starts, contexts)
    )
    return PagedRows(row, begin, context)
