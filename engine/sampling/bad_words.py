"""Runs of tokens that an output never has: which tokens would complete one now.

The words lie end to end, an entry for each token. An entry is armed while the output ends with the
tokens of its word before it; a word's first entry always is. So a token is banned if it is that of
a word's last entry and the entry is armed, and a drawn token arms the entries behind those that
were armed and are its own (Shift-And: Baeza-Yates and Gonnet, 1992, with a word per pattern). What
tokens came before the output does not matter, which is how vLLM has it; Hugging Face's generate
also reads the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenpod.core.sampling import BAD_WORD_BITS, BEGINS_WORD, ENDS_WORD

Entries = npt.NDArray[np.int32]
Armed = npt.NDArray[np.float32]


def entries_of(words: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[Entries, Armed]:
    """[m] each: the entries of these words, and which are armed (1, others 0) after `outputs`.

    An entry is its token above `BAD_WORD_BITS` bits: whether it begins a word, and whether it ends
    one.
    """
    entries = [
        token << BAD_WORD_BITS | BEGINS_WORD * (at == 0) | ENDS_WORD * (at == len(word) - 1)
        for word in words
        for at, token in enumerate(word)
    ]
    longest = max(map(len, words))
    found = BadWords(np.array(entries, np.int32))
    for token in outputs[max(len(outputs) - longest, 0) :]:
        found.note(token)
    return found.entries, found.armed


class BadWords:
    """A row's bad words and how far its output is into each; see `entries_of`.

    `armed` None: the output is empty.
    """

    def __init__(self, entries: Entries, armed: Armed | None = None) -> None:
        self.entries = entries
        self._tokens = (entries >> BAD_WORD_BITS).astype(np.int64)
        self._begins = (entries & BEGINS_WORD) != 0
        self._ends = (entries & ENDS_WORD) != 0
        self._armed = self._begins if armed is None else armed != 0

    @property
    def armed(self) -> Armed:
        """[m]: 1 where the output ends with what comes before this entry in its word, else 0."""
        armed: Armed = self._armed.astype(np.float32)
        return armed

    @property
    def banned(self) -> npt.NDArray[np.int64]:
        """[k]: tokens that would complete a word, each once."""
        return np.unique(self._tokens[self._ends & self._armed])

    def note(self, token: int) -> None:
        """A token has been drawn."""
        follows = np.zeros_like(self._armed)
        follows[1:] = (self._armed & (self._tokens == token))[:-1]
        self._armed = self._begins | follows
