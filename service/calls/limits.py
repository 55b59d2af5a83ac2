"""Every limit on what clients send, in one place.

Each check names the field, its value and the limit, and raises InvalidArgument. Fields have the
names that `call.py` and generate.v3 give them; a dialect with other names passes a map to
`field_names` of `fields.py`. Zero is neutral: a proto3 client cannot tell 0 from "not set", so both
mean the same where a field is not `optional`. TGI's shard protocol has `serving/shard_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tokenpod.core.requests import BeamParams
from tokenpod.core.sampling import MOST_TOP_TOKENS, TABLE
from tokenpod.service.calls.call import (
    AskedConstraint,
    ConstraintKind,
    GenerateCall,
    Sampling,
    Stopping,
    TokensCall,
)
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.errors import InvalidArgument

MOST_PRIORITY = 100
#: Of a beam search, on length.
MOST_PENALTY = 10
#: Messages of a chat: each becomes Python objects, here and in a template, however short it is.
MOST_CHAT_MESSAGES = 4096
#: Ids that `Tokens` lists: writing a message of more would hold up the event loop.
MOST_RETURNED_IDS = 262_144
MOST_REQUEST_ID_BYTES = 256
#: Texts of a choice.
MOST_CHOICES = 4096
#: Likeliest tokens of all positions of a prompt: writing the message of more would hold up the
#: event loop.
MOST_PROMPT_TOPS = 32_768


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for."""

    vocab_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_samples: int
    max_stop_sequences: int
    max_stop_sequence_bytes: int
    max_top_n_tokens: int
    max_logit_bias: int
    #: Bytes of a constraint.
    max_constraint_bytes: int
    #: KV slots: n samples of a request must fit at once.
    slots: int
    #: Sequences that can run at once.
    rows: int
    #: Tokens that a step may draft for a sequence.
    drafts: int = 0


class NeverFits(InvalidArgument):
    """The request is larger than this server could ever take, whatever else runs."""


class PromptTooLong(NeverFits):
    """A prompt leaves no room for an answer.

    Args:
        tokens: it has so many.
        most: it may have so many.
    """

    def __init__(self, tokens: int, most: int) -> None:
        self.tokens = tokens
        self.most = most
        super().__init__(
            "prompt",
            f"has {tokens} tokens; this server allows at most {most}"
            " (--max-input-tokens); set `truncate` to keep the last ones only",
        )


def check_generate(call: GenerateCall, limits: RequestLimits) -> None:
    """Everything that can be said before the prompt is tokenised."""
    _check_prompt(call, limits)
    _check_sampling(call.sampling, limits)
    if call.beam is not None:
        _check_beam(call.beam, limits)
    else:
        _check_samples(call, limits)
    _check_stopping(call.stopping, limits)
    most = min(limits.max_top_n_tokens, limits.vocab_size)
    for field in ("top_n_tokens", "prompt_top_n_tokens"):
        at_most(f"output.{field}", getattr(call.output, field), most, "--max-top-n-tokens")
    at_most("max_draft_tokens", call.max_draft_tokens or 0, limits.drafts, "--speculate")
    if abs(call.priority) > MOST_PRIORITY:
        refuse("priority", call.priority, f"must be from -{MOST_PRIORITY} to {MOST_PRIORITY}")
    check_request_id(call.request_id)
    if call.constraint is not None:
        check_constraint(call.constraint, limits)
        if call.stopping.ignore_eos:
            problem = "is of no use with a constraint: a text that is whole must be able to end"
            raise InvalidArgument("stopping.ignore_eos", problem)


def check_constraint(asked: AskedConstraint, limits: RequestLimits) -> None:
    """How long a constraint is, and its choices; the rest is said once it is read."""
    most = limits.max_constraint_bytes
    if asked.size > most:
        problem = f"has {asked.size} bytes; this server allows {most} (--max-constraint-bytes)"
        raise InvalidArgument(asked.field, problem)
    if asked.kind is ConstraintKind.CHOICE:
        few_entries(asked.field, len(asked.texts), MOST_CHOICES)
        if not asked.texts:
            raise InvalidArgument(asked.field, "is empty; at least one text is needed")
        if "" in asked.texts:
            raise InvalidArgument(f"{asked.field}[{list(asked.texts).index('')}]", "is empty")


def check_tokens(call: TokensCall, limits: RequestLimits) -> None:
    """A text may be empty, a chat may not: templates need a message."""
    if isinstance(call.prompt, ChatPrompt):
        _check_chat(call.prompt, limits)


def check_chat_length(messages: int) -> None:
    """How many messages a chat has; asked before they are converted."""
    few_entries("chat.messages", messages, MOST_CHAT_MESSAGES)


def check_returned_ids(tokens: int) -> None:
    """How many ids `Tokens` is to list."""
    if tokens > MOST_RETURNED_IDS:
        problem = f"asks for the ids of {tokens} tokens; this server lists {MOST_RETURNED_IDS}"
        raise InvalidArgument("return_ids", problem)


def check_detokenize(ids: Sequence[int], limits: RequestLimits) -> None:
    """The tokens whose text is asked for."""
    few_entries("token_ids", len(ids), MOST_RETURNED_IDS)
    _check_token_ids("token_ids", ids, limits)


def check_request_id(request_id: str, field: str = "request_id") -> None:
    """At most 256 bytes of printable ASCII. `field`: where the client put it."""
    if len(request_id) > MOST_REQUEST_ID_BYTES:
        problem = f"has {len(request_id)} characters; at most {MOST_REQUEST_ID_BYTES} are allowed"
        raise InvalidArgument(field, problem)
    if not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument(field, "must be printable ASCII")


def max_new_tokens(
    prompt_tokens: int,
    wanted: int | None,
    limits: RequestLimits,
    *,
    shorten: bool = False,
    virtual_tokens: int = 0,
) -> int:
    """How many tokens a sequence may generate; checks prompt and output together.

    `shorten`: what does not fit is left out, and not refused. `virtual_tokens`: of the adapter,
    before the prompt.
    """
    if prompt_tokens == 0:
        raise InvalidArgument("prompt", "has no tokens; at least 1 is needed")
    if prompt_tokens > limits.max_input_tokens:
        raise PromptTooLong(prompt_tokens, limits.max_input_tokens)
    room = limits.max_total_tokens - prompt_tokens - virtual_tokens
    if room < 1 and virtual_tokens:
        problem = f"has {prompt_tokens} tokens; {beside(virtual_tokens)} leave no room for an"
        raise NeverFits(
            "prompt", f"{problem} answer (--max-total-tokens {limits.max_total_tokens})"
        )
    if wanted is None:
        return room
    if wanted > room and shorten:
        return room
    if wanted > room:
        raise NeverFits(
            "stopping.max_new_tokens",
            f"is {wanted}; with {prompt_tokens} prompt tokens{and_virtual(virtual_tokens)}"
            f" at most {room} are possible (--max-total-tokens {limits.max_total_tokens})",
        )
    return wanted


def check_prompt_tops(prompt_tokens: int, top_n: int) -> None:
    """Bound the likeliest tokens that are reported for all positions of a prompt together."""
    if prompt_tokens * top_n > MOST_PROMPT_TOPS:
        raise InvalidArgument(
            "output.prompt_top_n_tokens",
            f"is {top_n}; with {prompt_tokens} prompt tokens at most"
            f" {MOST_PROMPT_TOPS // prompt_tokens} are possible ({MOST_PROMPT_TOPS} in all)",
        )


def check_group(
    prompt_tokens: int, new_tokens: int, call: GenerateCall, limits: RequestLimits
) -> None:
    """All samples, or beams, of a request hold their keys and values at the same time."""
    samples, field, kind = call.sequences, "sampling.n", "samples"
    if call.beam is not None:
        field, kind = "sampling.beam.width", "beams"
    # They share the prompt; each but the first computes its last token once more, and the last
    # tokens' keys and values are never written.
    need = prompt_tokens + samples * (new_tokens - 1) + samples - 1
    if need > limits.slots:
        raise NeverFits(
            field,
            f"{samples} {kind} of up to {new_tokens} new tokens need {need} tokens of KV cache;"
            f" this server has {limits.slots} (--max-batch-total-tokens)",
        )


def beam_tops(beam: BeamParams, ends: int, limits: RequestLimits) -> int:
    """Most likely tokens of each beam that a search looks at.

    `ends`: different tokens that end the text.
    """
    width, most = beam.width, min(MOST_TOP_TOKENS, limits.vocab_size)
    if width + ends > most:
        problem = f"with {ends} tokens that end the text at most {max(most - ends, 0)} are possible"
        refuse("sampling.beam.width", width, problem)
    return width + ends


# -- Generate ----------------------------------------------------------------------------------


def _check_prompt(call: GenerateCall, limits: RequestLimits) -> None:
    prompt = call.prompt
    if prompt is None:
        raise InvalidArgument("prompt", "one of text, token_ids and chat must be set")
    if isinstance(prompt, ChatPrompt):
        _check_chat(prompt, limits)
    elif not isinstance(prompt, str):
        if not prompt:
            raise InvalidArgument("token_ids.ids", "is empty; at least one token is needed")
        _check_token_ids("token_ids.ids", prompt, limits)
    elif not prompt:
        raise InvalidArgument("text", "is empty; at least one character is needed")


def _check_chat(chat: ChatPrompt, limits: RequestLimits) -> None:
    if not chat.messages:
        raise InvalidArgument("chat.messages", "is empty; at least one message is needed")
    size, most = sum(len(tool.schema.encode()) for tool in chat.tools), limits.max_constraint_bytes
    if size > most:
        problem = f"has schemas of {size} bytes; this server allows {most} (--max-constraint-bytes)"
        raise InvalidArgument("chat.tools", problem)


def _check_sampling(sampling: Sampling, limits: RequestLimits) -> None:
    if sampling.temperature == 0 and sampling.do_sample:
        raise InvalidArgument(
            "sampling.temperature", "is 0 (greedy) while sampling.do_sample is true"
        )
    for column in TABLE.columns:
        value, knob = getattr(sampling, column.name, None), column.knob
        if value is not None and knob.low is not None:
            between(f"sampling.{column.name}", value, knob.low, knob.high)
    field, allowed = "sampling.allowed_token_ids", sampling.allowed_token_ids
    few_entries(field, len(allowed), limits.max_logit_bias, "--max-logit-bias")
    _check_token_ids(field, allowed, limits)
    field, words = "sampling.bad_words", sampling.bad_words
    few_entries(field, len(words), limits.max_logit_bias, "--max-logit-bias")
    _check_texts(field, words, limits)
    if len(sampling.logit_bias) > limits.max_logit_bias:
        problem = f"names {len(sampling.logit_bias)} tokens; at most {limits.max_logit_bias}"
        raise InvalidArgument("sampling.logit_bias", f"{problem} are allowed (--max-logit-bias)")
    for token, bias in sampling.logit_bias.items():
        if token >= limits.vocab_size:
            _refuse_token(f"sampling.logit_bias[{token}]", token, limits)
        between(f"sampling.logit_bias[{token}]", bias, -100, 100)


def _check_samples(call: GenerateCall, limits: RequestLimits) -> None:
    n = call.sampling.n or 1
    best_of = call.sampling.best_of or n
    most = min(limits.max_samples, limits.rows)
    at_most("sampling.n", n, most, "--max-best-of")
    at_most("sampling.best_of", best_of, most, "--max-best-of")
    if best_of < n:
        refuse("sampling.best_of", best_of, f"must be at least sampling.n, {n}")
    if best_of > n and call.output.stream:
        problem = f"more than sampling.n ({n}) can only be compared at the end"
        refuse("sampling.best_of", best_of, f"{problem}: set output.stream false")


def _check_beam(beam: BeamParams, limits: RequestLimits) -> None:
    if beam.width < 2:
        refuse("sampling.beam.width", beam.width, "at least 2 are needed")
    most = min(limits.max_samples, limits.rows)
    at_most("sampling.beam.width", beam.width, most, "--max-best-of")
    if not 1 <= beam.n <= beam.width:
        problem = f"must be from 1 to sampling.beam.width, {beam.width}"
        refuse("sampling.beam.n", beam.n, problem)
    between("sampling.beam.length_penalty", beam.length_penalty, -MOST_PENALTY, MOST_PENALTY)


def _check_stopping(stopping: Stopping, limits: RequestLimits) -> None:
    if stopping.max_new_tokens == 0:
        raise InvalidArgument("stopping.max_new_tokens", "is 0; at least 1 is needed")
    most_new = stopping.max_new_tokens or limits.max_total_tokens
    if stopping.min_new_tokens > most_new:
        refuse("stopping.min_new_tokens", stopping.min_new_tokens, f"must be at most {most_new}")
    field, stops = "stopping.stop_sequences", stopping.stop_sequences
    few_entries(field, len(stops), limits.max_stop_sequences, "--max-stop-sequences")
    _check_texts(field, stops, limits)
    field, ids = "stopping.stop_token_ids", stopping.stop_token_ids
    few_entries(field, len(ids), limits.max_logit_bias, "--max-logit-bias")
    _check_token_ids(field, ids, limits)


def _check_texts(field: str, texts: Sequence[str], limits: RequestLimits) -> None:
    """None is empty, and none longer than a stop sequence may be."""
    for at, text in enumerate(texts):
        size = len(text.encode())
        if size == 0:
            raise InvalidArgument(f"{field}[{at}]", "is empty")
        if size > (most := limits.max_stop_sequence_bytes):
            problem = f"has {size} bytes; this server allows {most} (--max-stop-sequence-bytes)"
            raise InvalidArgument(f"{field}[{at}]", problem)


# -- shared ------------------------------------------------------------------------------------


def between(field: str, value: float, low: float, high: float) -> None:
    """A finite number from `low` to `high`, both included."""
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"from {low} to {high}" if math.isfinite(high) else f"finite and at least {low}"
        refuse(field, value, f"must be {bounds}")


def at_most(field: str, value: int, most: int, flag: str | None) -> None:
    """At most so much. `flag`: where an operator allows more."""
    if value > most:
        source = f" ({flag})" if flag else ""
        raise InvalidArgument(field, f"is {value}; this server allows at most {most}{source}")


def few_entries(field: str, count: int, most: int, flag: str | None = None) -> None:
    """At most so many. `flag`: where an operator allows more."""
    if count > most:
        source = f" ({flag})" if flag else ""
        raise InvalidArgument(field, f"has {count} entries; this server allows {most}{source}")


def refuse(field: str, value: object, problem: str) -> NoReturn:
    """Raise InvalidArgument: what a field is, and what is wrong with it."""
    shown = f"{value:g}" if isinstance(value, float) else value
    raise InvalidArgument(field, f"is {shown}; {problem}")


def beside(virtual_tokens: int) -> str:
    """What an adapter takes of a request's room."""
    return f"{virtual_tokens} virtual tokens of the adapter"


def and_virtual(virtual_tokens: int) -> str:
    """The same behind a number of tokens; empty without any."""
    return f" and {beside(virtual_tokens)}" if virtual_tokens else ""


def _check_token_ids(field: str, ids: Sequence[int], limits: RequestLimits) -> None:
    # Millions of ids fit into a message: no Python step for each.
    if ids and max(ids) >= limits.vocab_size:
        at = next(at for at, token in enumerate(ids) if token >= limits.vocab_size)
        _refuse_token(f"{field}[{at}]", ids[at], limits)


def _refuse_token(field: str, token: int, limits: RequestLimits) -> None:
    refuse(field, token, f"token ids of this model are below {limits.vocab_size}")
