"""What every worker process answers besides the results of its own kind of job."""

from __future__ import annotations

from enum import IntEnum

from tokenpod.core.message import Message


class Loaded(Message, frozen=True, array_like=True, tag=True):
    """The worker is ready for its first job."""


class Refusal(IntEnum):
    """Why a job has no result."""

    #: The job itself is at fault; the text is for the client and says how.
    JOB = 1
    #: A library fails on the job: a panic; the text is for the log.
    LIBRARY = 2
    #: The job takes more memory than a worker may.
    MEMORY = 3
    #: A bug of ours; the text is for the log.
    FAULT = 4


class Refused(Message, frozen=True, array_like=True, tag=True):
    """The job has no result; the worker goes on. `field`: of the job, what is to blame."""

    reason: Refusal
    message: str
    field: str = ""
