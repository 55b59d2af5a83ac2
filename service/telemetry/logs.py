"""Log lines: for people by default, as JSON on request. Never a prompt, never a completion.

    who logs --record--> a bounded queue --> a thread: a line, written to standard error

Who logs waits for nothing: an event loop must not stand still because a disk is full, or because
whoever reads our standard error does not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue

#: Records that may wait for the thread that writes: some megabytes.
_MOST_WAITING = 8192
#: Seconds that an end waits for lines that have not been written.
_FLUSH_SECONDS = 2.0
#: Seconds that the thread waits for further lines before it writes the first.
_GATHER_SECONDS = 0.02
#: The logger of lines that are gathered; those of others are written at once.
ACCESS = "tokenpod.access"
#: Characters of lines that are written at once: what a pipe takes whole.
_MOST_AT_ONCE = select.PIPE_BUF - 512

#: Of a record that says nothing of who logs: neither file and line nor thread and process.
_BLANK = {
    **vars(logging.makeLogRecord({})),
    **dict.fromkeys(("thread", "threadName", "process", "processName", "taskName")),
}
_OWN = frozenset(_BLANK) | {"message", "asctime"}


def plain_record(
    name: str, level: int, message: str, extras: Mapping[str, object]
) -> logging.LogRecord:
    """A record for `Logger.handle` at a seventh of what `Logger.log` takes.

    `log` looks for its caller's file and line, and asks for thread and process.
    """
    record, now = logging.LogRecord.__new__(logging.LogRecord), time.time()
    own = {"name": name, "levelno": level, "levelname": logging.getLevelName(level)}
    own |= {"msg": message, "created": now, "msecs": now % 1 * 1e3}
    record.__dict__ = {**_BLANK, **own, **extras}
    return record


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Of the record's exception, if it has one."""
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    return record.exc_text or ""


#: Without what stands between fields, between a name and a value, and around several words.
_WORD = re.compile('[^ ="]+')
_NUMBERS = frozenset({int, float, bool})


def _quoted(value: object) -> str:
    """`value` as one word: a client's own text must not look like a field, or a line, of ours."""
    text = str(value)
    if type(value) in _NUMBERS or (_WORD.fullmatch(text) and text.isprintable()):
        return text
    return json.dumps(text)


class TextFormatter(logging.Formatter):
    """`2026-11-21T10:20:00.123Z INFO tokenpod: serving model_id=demo ...`"""

    converter = staticmethod(time.gmtime)
    #: The second that was last written, and its text: lines come many in a second.
    _second, _moment = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """One line, then the traceback if there is one."""
        extras = "".join(f" {key}={_quoted(value)}" for key, value in _extras(record).items())
        head = f"{self._time(record)} {record.levelname} {record.name}: "
        line = f"{head}{record.getMessage()}{extras}"
        traceback = _traceback(self, record)
        return f"{line}\n{traceback}" if traceback else line

    def _time(self, record: logging.LogRecord) -> str:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._moment = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return f"{self._moment}.{int(record.msecs):03d}Z"


class JsonFormatter(TextFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback inside."""
        entry: dict[str, object] = {
            "time": self._time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if traceback := _traceback(self, record):
            entry["exception"] = traceback
        return json.dumps(entry, default=str)


class LineWriter(logging.Handler):
    """Makes lines and writes them from a thread of its own.

    What does not fit into the queue, or can't be written, is dropped; a line says how many were,
    once lines can be written again. Whole lines are written at once, so that those of several
    processes with one standard error don't mix.

    Args:
        descriptor: of the file to write to.
        formatter: makes lines of records.
        most: records that may wait.
    """

    def __init__(
        self, descriptor: int, formatter: logging.Formatter, most: int = _MOST_WAITING
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        self._most = most
        self._waiting: SimpleQueue[logging.LogRecord | str | threading.Event] = SimpleQueue()
        #: What waits is to be written at once.
        self._pressing = threading.Event()
        #: Lines that did not fit, which those count who log; that could not be written, and of both
        #: those that a line has told of, which the thread counts.
        self._refused = self.unwritten = self._told = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Records that have not been taken up."""
        return self._waiting.qsize()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; called with the handler's lock."""
        # Later the objects in it may have changed, and a traceback would keep its frames.
        record.msg, record.args = record.getMessage(), None
        _traceback(self.formatter or TextFormatter(), record)
        record.exc_info = None
        self._put(record)
        if record.name != ACCESS:
            self._pressing.set()

    def tell(self, text: str) -> None:
        """Write a text for people behind what has been logged so far."""
        with self.lock or contextlib.nullcontext():
            self._put(text)

    def flush(self) -> None:
        """Wait until all that has been logged so far is written, for two seconds at most."""
        written = threading.Event()
        self._waiting.put(written)
        self._pressing.set()
        written.wait(_FLUSH_SECONDS)

    def _put(self, what: logging.LogRecord | str) -> None:
        if self.waiting >= self._most:
            self._refused += 1
        else:
            self._waiting.put(what)

    def _write_all(self) -> None:
        while True:
            what = self._waiting.get()
            if not isinstance(what, threading.Event):
                # More may come at once. A thread that wakes for each line takes the interpreter
                # from the event loop each time, which costs ten times what the line does.
                self._pressing.wait(_GATHER_SECONDS)
                self._pressing.clear()
            self._write_waiting(what)
            if self._waiting.empty():
                self._tell_dropped()

    def _write_waiting(self, what: logging.LogRecord | str | threading.Event) -> None:
        """Write this and what waits behind it."""
        lines = list[str]()
        while True:
            if isinstance(what, threading.Event):
                self._write_lines(lines)
                what.set()
            else:
                line = what if isinstance(what, str) else self.format(what)
                if sum(map(len, lines)) + len(line) > _MOST_AT_ONCE:
                    self._write_lines(lines)
                lines.append(line)
            try:
                what = self._waiting.get_nowait()
            except Empty:
                self._write_lines(lines)
                return

    def _write_lines(self, lines: list[str]) -> None:
        """Write them, and leave the list empty."""
        try:
            if lines:
                self._write("\n".join(lines))
        except OSError:
            self.unwritten += len(lines)
        lines.clear()

    def _tell_dropped(self) -> None:
        """Say how many lines were dropped since this was last said."""
        dropped = self._refused + self.unwritten
        if dropped == self._told:
            return
        text = "log lines were dropped: they could not be written in time"
        record = logging.LogRecord("tokenpod", logging.WARNING, "", 0, text, None, None)
        record.lines = dropped - self._told
        with contextlib.suppress(OSError):
            self._write(self.format(record))
            self._told = dropped

    def _write(self, line: str) -> None:
        """Raises OSError."""
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                # Who has started us may have made the file one that never blocks.
                select.select((), (self._descriptor,), ())


def print_error(text: str, *, json_output: bool, kind: str = "error") -> None:
    """Print why a start fails, on standard error: `error: text`, or JSON as log lines are.

    Args:
        text: one line.
        json_output: which of them.
        kind: `error` or `warning`.
    """
    for handler in logging.getLogger().handlers:
        # What has been logged came before.
        handler.flush()
    if not json_output:
        print(f"{kind}: {text}", file=sys.stderr)
        return
    level = logging.getLevelNamesMapping()[kind.upper()]
    record = logging.LogRecord("tokenpod", level, "", 0, text, None, None)
    print(JsonFormatter().format(record), file=sys.stderr)


def configure_logging(*, level: str, json_output: bool) -> LineWriter:
    """Send every logger's lines to standard error; what writes them."""
    writer = LineWriter(sys.stderr.fileno(), JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[writer], force=True)
    # grpc.aio logs every exception that a handler lets through; ours are answers, not faults.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    return writer
