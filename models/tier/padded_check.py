"""What a class with caches of its own does rightly, found out before it is served.

A class may ignore a mask, number tokens by itself, forget its state where several tokens follow it,
or mix up a batch's rows. Its text would be wrong without any error. So a short text is computed in
every way that serving takes, and compared with what transformers says of it at once. What goes
wrong is not done; where nothing else is left, the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tokenpod.kernels.operations.ops import Operations
from tokenpod.models.tier.check import TOKENS, Steps, compare
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.tier.padded import Abilities, Cached, PaddedModel, Together
from tokenpod.models.tier.spec import TierSpec

#: Of the check's text, where an encoder reads a part of it.
PROMPT = 9
#: By how much another text is longer, where lengths may differ.
_AHEAD = 2
#: Of a long text, at most; of a short one where states don't grow; and how many of their tokens
#: follow prompts.
LONG, SHORT, FOLLOW = 254, 13, 4


@dataclass(frozen=True, slots=True)
class AtOnce:
    """What transformers says of a text without any cache."""

    model: Any
    #: The decoder's first token, if there is an encoder.
    start: int | None

    def logits(self, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        """[n, vocabulary] of tokens [n]; with an encoder from the last of the prompt on."""
        if self.start is None:
            logits: torch.Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
            return logits
        decoder = torch.cat((tokens.new_tensor([self.start]), tokens[prompt:]))
        named = {"input_ids": tokens[None, :prompt], "decoder_input_ids": decoder[None]}
        logits = self.model(**named, use_cache=False).logits[0]
        return logits


class Trials:
    """The ways of one model.

    Args:
        spec: what is known of it.
        cached: the model.
        ops: of its device.
        tokens: [n] int64, from TOKENS to LONG: as many as the model has positions.
        at_once: what it says by itself.
    """

    def __init__(
        self,
        spec: TierSpec,
        cached: Cached,
        ops: Operations,
        tokens: torch.Tensor,
        at_once: AtOnce,
    ) -> None:
        self._spec, self._cached, self._ops = spec, cached, ops
        self._long, self._tokens = tokens, tokens[:TOKENS]
        self._at_once = at_once
        with running("by itself"):
            self._expected = at_once.logits(self._tokens, PROMPT)

    def abilities(self) -> Abilities:
        """Raises NotServed if something is wrong that can't be done without."""
        plain = Abilities(Together.ALONE, continues=False)
        self._try("in one step", plain)
        self._try("token by token", plain)
        in_pieces = "in pieces, beside another text"
        can = Abilities(Together.ALONE, continues=True)
        if not self._does(in_pieces, can):
            self._try(in_pieces, plain)
            can = plain
        widest = Together.PADDED if self._cached.grows else Together.ANY
        for together in (widest, Together.ALIKE):
            more = Abilities(together, can.continues)
            if self._does("in a batch", more) and self._mixes_lengths(more):
                return more
        return can

    def _mixes_lengths(self, can: Abilities) -> bool:
        """Whether a short text beside a long one, in one batch, is what both are alone."""
        prompt, short = len(self._long) - FOLLOW, SHORT
        if can.together is Together.ALIKE or prompt < TOKENS:
            return True
        if can.together is Together.PADDED:  # no shorter one is in a batch with it
            short = (1 << (prompt.bit_length() - 1)) + FOLLOW
        model = PaddedModel(self._spec, self._cached, self._ops, can)
        try:
            with running("in a batch of a long and a short text"):
                got = Steps(model, self._long).far_apart(short, FOLLOW)
            for logits, tokens in zip(got, (self._long, self._long[:short]), strict=True):
                wanted = self._at_once.logits(tokens, len(tokens) - FOLLOW)[-FOLLOW:]
                compare(model.dtype, 0.0, logits, wanted, "beside a longer text", "masks")
        except NotServed:
            return False
        return True

    def _does(self, way: str, can: Abilities) -> bool:
        try:
            self._try(way, can)
        except NotServed:
            return False
        return True

    def _try(self, way: str, can: Abilities) -> None:
        """Raise NotServed, with what was seen, unless logits are right."""
        encodes, expected = self._cached.encodes, self._expected
        model = PaddedModel(self._spec, self._cached, self._ops, can)
        steps = Steps(model, self._tokens, PROMPT if encodes else TOKENS)
        with running(way):
            if way == "in one step":
                got = steps.whole()
            elif way == "token by token":
                got = steps.singly()
            elif way == "in a batch":
                got = steps.beside(0 if can.together is Together.ALIKE else _AHEAD)
                expected = expected[-len(got) :]
            else:
                got = steps.in_pieces()
        got = got[-len(expected) :]
        why = "it keeps more than its cache, or does not look back in order"
        said = f"{way} than by transformers at once"
        compare(model.dtype, 0.0, got, expected, said, why)


@contextmanager
def running(way: str) -> Iterator[None]:
    """Have what transformers' code raises name the way that it was run."""
    try:
        yield
    except NotServed:
        raise
    except Exception as error:  # whatever a class does with a cache that it does not expect
        line = " ".join(str(error).split())[:160]
        raise NotServed(f"its code can't run {way} ({type(error).__name__}: {line})") from None
