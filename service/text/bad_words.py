"""Words that an output never has: from texts to runs of tokens."""

from __future__ import annotations

from tokenpod.service.calls.call import Sampling
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.limits import RequestLimits
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.workers.text_messages import Text


async def token_runs(
    sampling: Sampling, encoder: Encoder, limits: RequestLimits
) -> list[list[int]]:
    """The tokens of each bad word as it stands, and behind a space where these are others.

    Most vocabularies have tokens of their own for a word after a space. That is how vLLM reads
    `bad_words`, but that it leaves out what has another number of tokens behind a space.

    Raises:
        InvalidArgument: a word has no token, or all have more than a row of the sampler holds.
    """
    words = list(dict.fromkeys(sampling.bad_words))
    if not words:
        return []
    most = limits.max_logit_bias
    spellings = [*words, *(f" {word.lstrip()}" for word in words if word.strip())]
    texts = [Text(each, special=False, keep=most + 1) for each in spellings]
    runs: dict[tuple[int, ...], None] = {}
    for at, found in enumerate(await encoder.encode_all(texts, field="sampling.bad_words")):
        if isinstance(found, InvalidArgument):
            raise found
        if not found.ids and at < len(words):
            word = sampling.bad_words.index(words[at])
            raise InvalidArgument(f"sampling.bad_words[{word}]", "has no tokens")
        if found.ids:
            runs[tuple(found.ids)] = None
    size, allowed = sum(map(len, runs)), len({*sampling.allowed_token_ids})
    if size + allowed > most:
        beside = f", besides {allowed} of sampling.allowed_token_ids" if allowed else ""
        problem = f"has {size} tokens, with and without a space before each word{beside}"
        problem = f"{problem}; this server allows {most} (--max-logit-bias)"
        raise InvalidArgument("sampling.bad_words", problem)
    return [[*run] for run in runs]
