"""The short forms of `make chaos`: attacks on a real pod, and mixed calls, that harm nobody."""

from __future__ import annotations

from chaos.campaign import campaign, table
from chaos.mixed import mixed


def test_a_pod_withstands_the_short_form() -> None:
    rows = campaign(seed=1, short=True)
    assert not [row.fault for row in rows if row.fault], table(rows)
    assert all(row.seen.served and row.routed.served for row in rows)


def test_calls_of_every_protocol_at_once_harm_nobody() -> None:
    minutes = mixed(seed=1, seconds=3.0, every=3.0)
    assert not [minute.fault for minute in minutes if minute.fault]
