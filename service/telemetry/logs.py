"""Log lines: for people by default, as JSON on request. Never a prompt, never a completion."""

from __future__ import annotations

import json
import logging
import sys
import time

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _quoted(value: object) -> str:
    """`value` as one word: a client's own text must not look like a field, or a line, of ours."""
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain and text else json.dumps(text)


class TextFormatter(logging.Formatter):
    """`2026-11-21T10:20:00.123Z INFO tokenpod: serving model_id=demo ...`"""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """One line, then the traceback if there is one."""
        moment = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        extras = "".join(f" {key}={_quoted(value)}" for key, value in _extras(record).items())
        line = f"{moment} {record.levelname} {record.name}: {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(TextFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, the traceback inside."""
        entry: dict[str, object] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def print_error(text: str, *, json_output: bool, kind: str = "error") -> None:
    """Print why a start fails, on standard error: `error: text`, or JSON as log lines are.

    Args:
        text: one line.
        json_output: which of them.
        kind: `error` or `warning`.
    """
    if not json_output:
        print(f"{kind}: {text}", file=sys.stderr)
        return
    level = logging.getLevelNamesMapping()[kind.upper()]
    record = logging.LogRecord("tokenpod", level, "", 0, text, None, None)
    print(JsonFormatter().format(record), file=sys.stderr)


def configure_logging(*, level: str, json_output: bool) -> None:
    """Send every logger's lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # grpc.aio logs every exception that a handler lets through; ours are answers, not faults.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
