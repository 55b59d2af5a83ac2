"""`pytest -n N`: tests in N processes, each forked from the one that has collected them all.

To import all test modules takes 20 seconds of a core in a new clone, which no process repeats. A
file's tests stay together, for what they share takes long to start; files are given out one by one,
in the order of the session.

    this process --- the next file's tests ---> process 0..N-1, which runs them
                 <-- calls of pytest's hooks ---
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn
from warnings import WarningMessage

import pytest

from tokenpod.core.own_process import die_with_parent

#: Of a process that was asked to end, until it is killed.
SECONDS_TO_END = 30.0
_ASK = "ask"


class Process:
    """One that is forked, as the one that forks it sees it."""

    def __init__(self, number: int, pid: int, link: Connection) -> None:
        self.number, self.pid, self.link = number, pid, link
        #: Places of tests in the session's list that it has been given and has not ended.
        self.tests = deque[int]()


class Processes:
    """Runs the session's tests; `number` is this process's, 0 where there is one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Raises what a loop of one process does."""
        if self.count < 2 or session.testsfailed or session.config.option.collectonly:
            return None
        places = itertools.groupby(
            range(len(session.items)), lambda place: session.items[place].path
        )
        files = deque([*each] for _, each in places)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        session.config.pluginmanager.get_plugin("terminalreporter").showfspath = False
        running = [self._fork(session, number) for number in range(min(self.count, len(files)))]
        try:
            while running:
                for link in wait([process.link for process in running]):
                    process = next(each for each in running if each.link is link)
                    if self._hear(session, process, files):
                        continue
                    running.remove(process)
                    if files:  # its own are among them, if it is lost
                        running.append(self._fork(session, process.number))
        finally:
            for process in running:
                os.kill(process.pid, signal.SIGINT)
            for process in running:
                _end(process)
        return True

    def _hear(self, session: pytest.Session, process: Process, files: deque[list[int]]) -> bool:
        """Do what a process says; whether it goes on."""
        try:
            what, values = process.link.recv()
        except EOFError:
            status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
            if status or process.tests:
                self._report_loss(session, process, status)
                if process.tests:
                    files.appendleft([*process.tests])
            return False
        if what == _ASK:
            process.tests.extend(files.popleft() if files else ())
            process.link.send([*process.tests])
            return True
        hook = session.config.hook
        if what == "pytest_runtest_logreport":
            values["report"] = hook.pytest_report_from_serializable(
                config=session.config, data=values["report"]
            )
        if what == "pytest_warning_recorded":
            values["warning_message"] = WarningMessage(*values["warning_message"])
            hook.pytest_warning_recorded.call_historic(kwargs=values)
        else:
            getattr(hook, what)(**values)
        if what == "pytest_runtest_logfinish":
            process.tests.popleft()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _report_loss(self, session: pytest.Session, process: Process, status: int) -> None:
        """The test that a process ran when it ended has failed, or a fixture behind the last."""
        item = session.items[process.tests.popleft() if process.tests else -1]
        session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"process {process.number} of the tests ended here, with status {status}",
                when="call",
            )
        )

    def _fork(self, session: pytest.Session, number: int) -> Process:
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"a process that forks has one thread, not {threads}"
        ours, theirs = Pipe()
        sys.stdout.flush()
        if pid := os.fork():
            theirs.close()
            return Process(number, pid, ours)
        die_with_parent()
        os.setpgid(0, 0)  # an interrupt from the keyboard comes through the parent
        ours.close()
        self.number = number
        _run(session, theirs, number)


def _end(process: Process) -> None:
    end = time.monotonic() + SECONDS_TO_END
    with contextlib.suppress(EOFError, OSError):
        while process.link.poll(max(end - time.monotonic(), 0)):
            process.link.recv()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


class Teller:
    """Has hooks called in the process that reports, instead of in this one."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link
        #: Warnings of before are told to plugins as they are registered, and reported already.
        self._ready = False
        config.pluginmanager.register(self)
        self._ready = True

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Of a test."""
        self._tell("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Of a test."""
        self._tell("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of each phase of a test."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("pytest_runtest_logreport", report=data)

    def pytest_warning_recorded(
        self, warning_message: WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """The warning travels as its text: some have what can't."""
        if not self._ready:
            return
        warned = warning_message
        message = (
            str(warned.message),
            warned.category,
            warned.filename,
            warned.lineno,
            None,
            warned.line,
        )
        self._tell(
            "pytest_warning_recorded",
            warning_message=message,
            when=when,
            nodeid=nodeid,
            location=location,
        )

    def _tell(self, hook: str, **values: object) -> None:
        self._link.send((hook, values))


def _run(session: pytest.Session, link: Connection, number: int) -> NoReturn:
    """In a forked process: run what the other one gives, and end."""
    status = 1
    try:
        _part_from_parent(session.config, number)
        Teller(session.config, link)
        item = None
        while places := _asked(link):
            for place in places:
                item = session.items[place]
                # What belongs to the session stays; which file is next is asked behind this one.
                item.ihook.pytest_runtest_protocol(item=item, nextitem=session)
        if item is not None:
            _end_session(item)
        status = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        with contextlib.suppress(BaseException):
            session._setupstate.teardown_exact(None)  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _asked(link: Connection) -> list[int]:
    link.send((_ASK, None))
    return link.recv()  # type: ignore[no-any-return]


def _part_from_parent(config: pytest.Config, number: int) -> None:
    """Files that a process writes are its own from here on."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"process{number}"
    folders._basetemp.mkdir(mode=0o700, exist_ok=True)


def _end_session(item: pytest.Item) -> None:
    """Tear down what belongs to the session, and report its errors as those of the last test."""
    end = item.session._setupstate.teardown_exact  # type: ignore[attr-defined]
    call = pytest.CallInfo.from_call(lambda: end(None), when="teardown")
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    if report.failed:
        item.ihook.pytest_runtest_logreport(report=report)
