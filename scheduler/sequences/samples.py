"""The samples of a request: sequences with one prompt."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from tokenpod.core.requests import Request
from tokenpod.scheduler.pool.given import VectorIds
from tokenpod.scheduler.sequences.sequence import Group, Planner, Sequence
from tokenpod.scheduler.sequences.table import Table


def samples_of(
    request: Request, planner: Planner, table: Table, vectors: VectorIds
) -> list[Sequence]:
    """The sequences of a request, which nobody has queued yet.

    Args:
        request: one whose adapter is there.
        planner: plans them.
        table: has a place for each from now on.
        vectors: numbers embeddings that stand in for tokens.
    """
    if request.given or request.virtual_tokens:
        prompt = vectors.prompt_of(request)
    else:
        prompt = np.array(request.prompt, np.int32)
    if request.mutual:
        # Keys and values of its tokens depend on all of it: it shares them with its like alone.
        whole = hashlib.sha256(prompt.tobytes()).hexdigest()
        request = msgspec.structs.replace(request, salt=f"{request.salt} {whole}")
    streams = range(len(request.sequence_ids))
    samples = [Sequence(request, i, prompt, table, planner) for i in streams]
    group = None if request.beam is None else Group(request, request.beam, samples)
    together = [*samples]
    for sequence in samples:
        sequence.samples = together
        sequence.group = group
    return samples
