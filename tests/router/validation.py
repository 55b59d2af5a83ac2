"""What a router checks in a prompt, and what it makes of it, before any shard hears of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from router.queue import Entry
from router.startup import Limits, RouterSettings
from router.streams import Prompt, Stream

#: A text's tokens, special ones included.
Tokenizer = Callable[[str], Sequence[int]]


class ValidationError(Exception):
    """The router refuses the prompt before any shard sees it (HTTP 422)."""


class Validation:
    """Makes entries of prompts.

    Args:
        settings: the router's flags.
        limits: what the shards agreed to.
        rng: draws seeds.
        tokenizer: where missing, a prompt's own `input_length` and `ids` are believed.
    """

    def __init__(
        self,
        settings: RouterSettings,
        limits: Limits,
        rng: random.Random,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._random = rng
        self._tokenizer = tokenizer

    def entry(self, prompt: Prompt, stream: Stream) -> Entry:
        """An entry for the queue. A prompt without a seed gets one.

        Raises:
            ValidationError: the prompt breaks a limit.
        """
        self._check(prompt)
        if self._tokenizer is not None:
            ids = tuple(self._tokenizer(prompt.text))
            prompt = replace(prompt, ids=ids, input_length=len(ids))
        length = min(prompt.input_length, prompt.truncate or prompt.input_length)
        total = self._limits.max_total_tokens
        wanted = prompt.max_new_tokens
        if wanted is None:
            wanted = max(0, total - length)
        # Nobody may reserve many tokens with a few large wishes: the rest is another request.
        now = min(wanted, self._settings.generation_length)
        if length + now > total:
            raise ValidationError(
                f"inputs ({length}) + max_new_tokens ({now}) is over max_total_tokens, {total}"
            )
        longest = self._limits.max_input_tokens
        if length > longest:
            raise ValidationError(f"inputs has {length} tokens; the limit is {longest}")
        if prompt.sampling.seed == 0:
            seed = self._random.getrandbits(64)
            prompt = replace(prompt, sampling=replace(prompt.sampling, seed=seed))
        truncate = prompt.truncate or longest
        return Entry(prompt, length, truncate, stream, max_new_tokens=now, wanted_tokens=wanted)

    def rest(self, entry: Entry, text: str, new_ids: Sequence[int]) -> Entry:
        """The prompt of a request that goes on after `text`: all that the user asked for, again.

        Raises:
            ValidationError: the prompt and what it would bring are too long by now.
        """
        prompt = entry.prompt
        longer = replace(
            prompt,
            text=prompt.text + text,
            ids=(*prompt.ids, *new_ids) if prompt.ids else (),
            input_length=prompt.input_length + len(new_ids),
        )
        return self.entry(longer, entry.stream)

    def _check(self, prompt: Prompt) -> None:
        settings, longest = self._settings, self._limits.max_input_tokens
        if prompt.max_new_tokens == 0:
            raise ValidationError("max_new_tokens is 0; it must be positive")
        if len(prompt.stop_sequences) > settings.max_stop_sequences:
            raise ValidationError(
                f"stop has {len(prompt.stop_sequences)} sequences; "
                f"the limit is {settings.max_stop_sequences}"
            )
        if prompt.top_n_tokens > settings.max_top_n_tokens:
            raise ValidationError(
                f"top_n_tokens is {prompt.top_n_tokens}; the limit is {settings.max_top_n_tokens}"
            )
        if not prompt.text:
            raise ValidationError("inputs is empty")
        if prompt.truncate is not None and not 0 < prompt.truncate <= longest:
            raise ValidationError(f"truncate is {prompt.truncate}; it must be 1 to {longest}")
        if prompt.grammar and settings.disable_grammar_support:
            raise ValidationError("grammar is not supported")
