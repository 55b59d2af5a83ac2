"""What the first front end observes of the pod, besides the engine's load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodReadings:
    """What the first front end knows of the pod, besides the engine's load.

    `started_at` and `certificate_expires` are Unix times; the latter is None without TLS, or where
    the file can't be read.
    """

    started_at: float
    ready: bool
    stalled: bool
    admitted: int
    call_bytes: int
    most_call_bytes: int
    certificate_expires: float | None
