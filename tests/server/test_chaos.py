"""The short form of `make chaos`: attacks on a real pod that nobody else may notice."""

from __future__ import annotations

from chaos.campaign import campaign, table


def test_a_pod_withstands_the_short_form() -> None:
    rows = campaign(seed=1, short=True)
    assert not [row.fault for row in rows if row.fault], table(rows)
    assert all(row.seen.served and row.routed.served for row in rows)
