"""What `tokenpod generate` prints of an answer."""

from __future__ import annotations

import io

import pytest

from tokenpod_client.cli.terminal import LiveText
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb


@pytest.mark.parametrize(("pieces", "rated"), [(2, True), (1, False)])
def test_a_rate_is_told_of_what_came_over_time(pieces, rated):
    """A beam search brings all of its tokens at once: their number over nothing is no rate."""
    out, notes = io.StringIO(), io.StringIO()
    live = LiveText(several=False, out=out, notes=notes)
    for _ in range(pieces):
        live.show(pb.GenerateResponse(tokens=pb.Tokens(text="a", token_ids=[7] * 20)))
    live.show(pb.GenerateResponse(finished=pb.Finished(generated_token_count=20 * pieces)))
    live.close()
    assert out.getvalue() == "a" * pieces + "\n"
    assert ("tokens/s" in notes.getvalue()) == rated
    assert notes.getvalue().startswith(f"[{20 * pieces} tokens; ")
