"""The chunks of rows with several tokens: listed on the host, before any layer is computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenpod.kernels.operations.batch import RaggedRows

#: What a chunk says: its first token, its tokens, the position of the first, and of a row's first
#: chunk the row's tokens, of others 0; less than 0 where the row has drafts.
FIELDS = 4

#: Tokens of a chunk: on an H200 prompts take 0.65 of the time that they take by 64.
CHUNK = 32


def cut_chunks(rows: RaggedRows, chunk: int = CHUNK) -> npt.NDArray[np.int32]:
    """[chunks, FIELDS] of the rows after the first `single_rows`, rows' first chunks first.

    `chunk`: tokens of one at most.
    """
    firsts, others = [], []
    for row in range(rows.single_rows, rows.rows):
        token, end = rows.b_start[row], rows.b_start[row + 1]
        position = rows.b_context[row] - (end - token)
        drafts = rows.b_drafts is not None and rows.b_drafts[row] > 0
        count = token - end if drafts else end - token
        firsts.append((token, min(chunk, end - token), position, count))
        others += [
            (token + done, min(chunk, end - token - done), position + done, 0)
            for done in range(chunk, end - token, chunk)
        ]
    return np.array([*firsts, *others], np.int32).reshape(-1, FIELDS)
