"""The rpcs of `tokenpod.admin.v1`, which the first front end answers."""

from __future__ import annotations

from typing import Any

import grpc

from tokenpod.service.calls.errors import FailedPrecondition, InvalidArgument, Unavailable
from tokenpod.service.dialects.tokenpod_v1.model import load_of
from tokenpod.service.pod.processes import PodProcesses
from tokenpod.service.rpc.interceptors import Context
from tokenpod.service.rpc.methods import SMALL, Access, Method, method_of
from tokenpod.service.serving.backend import Backend
from tokenpod_client.protos.tokenpod.admin.v1 import admin_service_pb2 as pb

_MOST_SECONDS, _USUAL_SECONDS = 60, 5
#: Severities from the lowest, by the numbers of `LogLevel` less one.
_LEVELS = ("debug", "info", "warning", "error")
_STATUSES = {code.value[0]: code.name for code in grpc.StatusCode}


async def get_status(
    backend: Backend, request: pb.GetStatusRequest, context: Context
) -> pb.GetStatusResponse:
    """What the pod runs, and what it has done."""
    processes, admission = _processes(backend), backend.admission
    counters = admission.counters
    answer = pb.GetStatusResponse(
        model=backend.model_id,
        stalled=counters.stalled,
        calls=[
            pb.CallCount(status=_STATUSES[number], count=count)
            for number, count in enumerate(counters.calls)
            if count
        ],
        call_bytes=counters.call_bytes,
        max_call_bytes=admission.memory.most,
        log_level=_number(processes.level),
        processes=[pb.Process(name=name, pid=pid) for name, pid in processes.pids.items()],
    )
    answer.time.GetCurrentTime()
    try:
        admission.check_open()
        answer.ready = backend.healthy()
    except Unavailable:
        answer.ready = False
    if backend.model_id and not backend.leader_address:
        serving = backend.generate.serving
        steps = serving.client.load.steps
        answer.load.CopyFrom(load_of(serving, admission))
        answer.step_count, answer.step_row_count = steps.steps, steps.rows
        answer.step_time_ms = steps.busy_ns // 1_000_000
        answer.generated_token_count = steps.generated
    return answer


async def set_log_level(
    backend: Backend, request: pb.SetLogLevelRequest, context: Context
) -> pb.SetLogLevelResponse:
    """Log less or more."""
    processes = _processes(backend)
    if not 0 < request.level <= len(_LEVELS):
        raise InvalidArgument("level", f"is {request.level}; it must be one of LogLevel")
    before = processes.level
    processes.set_level(_LEVELS[request.level - 1])
    return pb.SetLogLevelResponse(previous_level=_number(before))


async def dump_stacks(
    backend: Backend, request: pb.DumpStacksRequest, context: Context
) -> pb.DumpStacksResponse:
    """What threads do."""
    found = await _processes(backend).stacks(request.process)
    return pb.DumpStacksResponse(
        processes=[pb.ProcessStacks(process=name, stacks=text) for name, text in found]
    )


async def take_profile(
    backend: Backend, request: pb.TakeProfileRequest, context: Context
) -> pb.TakeProfileResponse:
    """Where a process spends its time."""
    processes = _processes(backend)
    if request.seconds > _MOST_SECONDS:
        raise InvalidArgument("seconds", f"is {request.seconds}; at most {_MOST_SECONDS}")
    name = request.process or processes.engine
    text = await processes.profile(name, request.seconds or _USUAL_SECONDS)
    return pb.TakeProfileResponse(process=name, folded_stacks=text)


def _processes(backend: Backend) -> PodProcesses:
    """Raises FailedPrecondition where the operator has not switched this on."""
    if backend.processes is None:
        raise FailedPrecondition(
            "this pod is not looked into by rpcs: --admin-token-file switches that on"
        )
    return backend.processes


def _number(level: str) -> pb.LogLevel.ValueType:
    return pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}")


def _row(name: str, serve: Any, **row: Any) -> Method:
    service = pb.DESCRIPTOR.services_by_name["AdminService"]
    return method_of(
        service,
        name,
        SMALL,
        serve=serve,
        strict=True,
        access=Access.ADMIN,
        on_followers=True,
        **row,
    )


METHODS = (
    _row("GetStatus", get_status, frequent=True),
    _row("SetLogLevel", set_log_level),
    _row("DumpStacks", dump_stacks),
    _row("TakeProfile", take_profile),
)
