"""Why a request or a router's step is refused at once, whatever else runs."""

from __future__ import annotations

from collections.abc import Mapping

from tokenpod.core.messages import PROBE_TOKENS, Advance
from tokenpod.core.outputs import Failure, FailureCode
from tokenpod.core.positions import positions_problem, spans_of
from tokenpod.core.requests import BeamParams, Request
from tokenpod.core.sampling import MOST_TOP_TOKENS
from tokenpod.scheduler.sequences.beam_search import BeamSearch
from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.work import Limits

#: A router's waiting requests may need so many times the slots in all: it counts for itself, and
#: requests that it has given up may still be here.
_MOST_WAITING = 2


def never_fits(request: Request, limits: Limits) -> str:
    """Why a request is impossible even if nothing else runs; empty if it is possible."""
    samples = len(request.sequence_ids)
    new_tokens = request.stopping.max_new_tokens
    if not request.prompt or new_tokens < 1:
        return "a request needs at least one prompt token and one new token"
    if request.prompt_logprobs and not limits.scores_prompts:
        return (
            "log probabilities of the prompt are asked for: an encoder reads it, and gives its "
            "tokens none"
        )
    if problem := _no_vectors(request, limits):
        return problem
    if (length := request.length) > limits.max_positions:
        return f"prompt and new tokens are {length}; at most {limits.max_positions} are possible"
    # Each sample but the first computes the last prompt token again.
    need = _bound(request) + (samples - 1) * new_tokens
    if need > limits.slots:
        return f"the request needs {need} tokens of KV cache; there are {limits.slots}"
    if samples > limits.max_rows:
        return f"the request has {samples} samples; {limits.max_rows} sequences run at once"
    if request.adapter and not request.virtual_tokens and not limits.adapter_slots:
        return f"adapter {request.adapter} is asked for, and there are no slots for adapters"
    if request.beam is not None and (problem := _no_search(request, request.beam, limits)):
        return problem
    if request.given and (problem := positions_problem(request, served=limits.own_positions)):
        return problem
    if problem := _no_spans(request, limits):
        return problem
    if request.probe and (samples > 1 or _bound(request) >= PROBE_TOKENS):
        return f"a probe is one sample of less than {PROBE_TOKENS} tokens, not {need}"
    return ""


def _no_spans(request: Request, limits: Limits) -> str:
    """Why vectors or tokens that see each other can't be computed; empty if they can be."""
    longest = max((end - start for start, end in spans_of(request)), default=0)
    if longest <= min(limits.mutual, limits.prefill_tokens):
        return ""
    what = "a prompt" if request.mutual else "an image"
    if longest > limits.mutual:
        return f"{longest} tokens of {what} see each other; those of this model: {limits.mutual}"
    return (
        f"{what} has {longest} tokens; a step reads {limits.prefill_tokens}, and this model reads"
        f" {what} in one (--max-batch-prefill-tokens)"
    )


def _no_vectors(request: Request, limits: Limits) -> str:
    """Why a text can't be read for its vectors, or only for these; empty if it can be."""
    if (request.pooling is not None) is not limits.pools:
        asked, served = ("vectors", "text") if request.pooling else ("text", "vectors")
        return f"{asked} is asked for; this model makes {served}"
    if not limits.pools:
        return ""
    if len(request.sequence_ids) > 1 or request.stopping.max_new_tokens != 1:
        return "a text that is read for its vectors is one sequence, which is not continued"
    if limits.whole_prompts and request.positions > limits.prefill_tokens:
        return (
            f"the text has {request.positions} tokens; a step reads {limits.prefill_tokens}, and"
            " this model reads a text in one (--max-batch-prefill-tokens)"
        )
    return ""


def _no_search(request: Request, beam: BeamParams, limits: Limits) -> str:
    """Why a search is impossible; empty if it is possible."""
    stopping, width = request.stopping, beam.width
    if not limits.sharing:
        return "beam search is asked for: rows of this model keep states of their own"
    if width != len(request.sequence_ids) or not 1 <= beam.n <= width:
        return f"{len(request.sequence_ids)} sequences and {beam.n} results of {width} beams"
    ends = len(stopping.eos_token_ids | stopping.stop_token_ids)
    if request.top_n_tokens < (least := BeamSearch.needed_tops(width, ends)):
        return f"a search needs {least} most likely tokens of each beam, not {request.top_n_tokens}"
    if least > MOST_TOP_TOKENS:
        return f"{width} beams and {ends} tokens that end the text are more than {MOST_TOP_TOKENS}"
    return ""


def malformed(op: Advance, sequences: Mapping[int, Sequence], limits: Limits) -> Failure | None:
    """What is wrong with a router's step, whatever the load; `sequences` are all that exist."""
    invalid = FailureCode.INVALID_ARGUMENT
    if len(op.start_chunks) != len(op.start):
        problem = f"{len(op.start)} sequences with {len(op.start_chunks)} pieces of prompts"
        return Failure(-1, invalid, problem)
    new: set[int] = set()
    for request in op.start:
        first, *others = request.sequence_ids
        if others:
            problem = f"a router's request is one sequence, not {len(others) + 1}"
            return Failure(first, invalid, problem)
        if first in new or first in sequences:
            return Failure(first, invalid, f"sequence {first} exists already")
        if problem := never_fits(request, limits):
            return Failure(first, invalid, problem)
        new.add(first)
    for sequence_id in op.resume:
        sequence = sequences.get(sequence_id)
        if sequence is None or sequence.dead or sequence.owner is not Owner.ROUTER:
            problem = f"sequence {sequence_id} is not a router's"
            return Failure(sequence_id, invalid, problem)
    return None


def too_much(op: Advance, waiting_tokens: int, limits: Limits) -> Failure | None:
    """Why a router's step needs too much, with what its waiting sequences may need already."""
    need, slots = sum(map(_bound, op.start)), limits.slots
    if need > slots or waiting_tokens + need > _MOST_WAITING * slots:
        problem = (
            f"the batch needs {need} tokens of KV cache, and requests that wait {waiting_tokens};"
            f" there are {slots} (--max-batch-total-tokens)"
        )
        return Failure(-1, FailureCode.RESOURCE_EXHAUSTED, problem)
    return None


def _bound(request: Request) -> int:
    """Slots that a request's first sample may come to need."""
    return request.positions + request.stopping.max_new_tokens - 1
