"""Runs tests in processes that are forked once all of them are collected: `pytest --processes 3`.

    this process: collects, hands out files, reports
        |--fork--> process 0: runs a file's tests, asks for the next file ...
        |--fork--> process 1

Imports and collection take as long as a tenth of all tests; here they happen once.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from support.pods import prefork

#: Which of the processes this one is, from 0 on; not there in a run without them.
NUMBER = pytest.StashKey[int]()
#: Seconds until a process that was told to end has torn down what its tests share.
_END_SECONDS = 60


@dataclass(eq=False)
class Worker:
    """A process, as the one that forked it sees it."""

    number: int
    pid: int
    link: Connection
    #: Places of the tests that it has, and that have not ended; the first one runs.
    left: list[int] = field(default_factory=list)
    done: bool = False


class ForkedRun:
    """Plugin of a run with more than one process."""

    def __init__(self, config: pytest.Config, processes: int) -> None:
        self._config = config
        self._processes = processes
        self._workers: list[Worker] = []
        #: Places of tests that nobody has yet, by file.
        self._files: list[list[int]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Instead of pytest's own loop."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        places = itertools.groupby(range(len(session.items)), lambda at: session.items[at].path)
        self._files = [[*file] for _, file in places]
        # Their dots come from several files at once.
        if reporter := self._config.pluginmanager.getplugin("terminalreporter"):
            reporter.showfspath = False
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if any(item.get_closest_marker("pod") for item in session.items):
            prefork.server()  # one for all, since its imports take long
        try:
            for number in range(min(self._processes, len(self._files))):
                self._fork(session, number)
            while links := {worker.link: worker for worker in self._workers if not worker.done}:
                for link in wait([*links]):
                    self._hear(session, links[link])  # type: ignore[index]
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _fork(self, session: pytest.Session, number: int) -> None:
        tasks = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
        assert tasks == 1, "a test module starts a thread when it is imported"
        ours, theirs = Pipe()
        if pid := os.fork():
            theirs.close()
            self._workers.append(Worker(number, pid, ours))
            return
        ours.close()
        for worker in self._workers:
            worker.link.close()
        _Runner(session, number, theirs).run()

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        try:
            said, *what = worker.link.recv()
        except (EOFError, OSError):
            self._died(session, worker)
            return
        hook = self._config.hook
        match said:
            case "next":
                file = self._files.pop(0) if self._files else []
                worker.left += file
                worker.link.send(file)
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=what[0])
                hook.pytest_runtest_logreport(report=report)
            case "finish":
                hook.pytest_runtest_logfinish(nodeid=what[0], location=what[1])
                worker.left.pop(0)
            case "warning":
                warning, when, nodeid, location = what
                hook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": warnings.WarningMessage(**warning),
                        "when": when,
                        "nodeid": nodeid,
                        "location": location,
                    }
                )
            case "done":
                worker.done = True

    def _died(self, session: pytest.Session, worker: Worker) -> None:
        """The test that ran fails; another process takes the others of its file."""
        worker.done = True
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self._workers.remove(worker)
        if worker.left:
            place, *others = worker.left
            item = session.items[place]
            report = pytest.TestReport(
                item.nodeid,
                item.location,
                keywords={},
                outcome="failed",
                longrepr=f"its process ended with status {status}",
                when="call",
            )
            self._config.hook.pytest_runtest_logreport(report=report)
            self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            self._files[:0] = [others] if others else []
        if self._files:
            self._fork(session, worker.number)

    def _end(self) -> None:
        for worker in self._workers:
            if not worker.done:
                os.kill(worker.pid, signal.SIGINT)
        for worker in self._workers:
            wait([worker.link], _END_SECONDS)  # hung up, or said it was done
            while not worker.done and worker.link.poll():
                try:
                    worker.done = worker.link.recv()[0] == "done"
                except (EOFError, OSError):
                    break
            if not worker.done:
                os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            worker.link.close()


class _Runner:
    """Plugin of a forked process: runs what it is given, and tells what comes of it."""

    def __init__(self, session: pytest.Session, number: int, link: Connection) -> None:
        self._session = session
        self._config = session.config
        self._link = link
        self._config.stash[NUMBER] = number

    def run(self) -> NoReturn:
        """Never returns into what was forked."""
        status = 1
        try:
            self._separate()
            self._run_items()
            self._link.send(["done"])
            status = 0
        except (KeyboardInterrupt, BrokenPipeError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._session._setupstate.teardown_exact(None)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(status)

    def _separate(self) -> None:
        """Have nothing more in common with the other processes: captured output, folders."""
        # Of what was registered, this alone is for each process: it ends those that tests leave.
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)
        plugins = self._config.pluginmanager
        if capture := plugins.getplugin("capturemanager"):
            capture.stop_global_capturing()
            capture.start_global_capturing()
        if reporter := plugins.getplugin("terminalreporter"):
            plugins.unregister(reporter)
            # Stacks of a test that takes too long are written to it.
            plugins.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"process{self._config.stash[NUMBER]}"
        factory._basetemp.mkdir(exist_ok=True)
        plugins.register(self)

    def _run_items(self) -> None:
        items = self._ask()
        item = next(items, None)
        while item is not None:
            # What files share is torn down as soon as no later test wants it.
            following = next(items, None)
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following

    def _ask(self) -> Iterator[pytest.Item]:
        while True:
            self._link.send(["next"])
            if not (places := self._link.recv()):
                return
            for place in places:
                yield self._session.items[place]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of setting up, calling and tearing down."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(["report", data])

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """A test has ended."""
        self._link.send(["finish", nodeid, location])

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Its text, where it can't be sent itself; those of collection are known."""
        if when != "runtest":
            return
        warning = {
            "message": warning_message.message,
            "category": warning_message.category,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
        }
        try:
            pickle.loads(pickle.dumps(warning))
        except Exception:
            warning |= {"message": str(warning_message.message), "category": UserWarning}
        self._link.send(["warning", warning, when, nodeid, location])
