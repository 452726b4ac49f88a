"""Log lines that name their process, process titles, and messages said once."""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TextIO

import setproctitle

TITLE_PREFIX: Final = "SERVE::"
_CYAN: Final = "\x1b[36m"
_RESET: Final = "\x1b[0m"
# Control characters, line separators, marks that reorder text, and lone surrogates that no stream can encode.
_UNSAFE: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_TRACEBACK: Final = re.compile(_UNSAFE.pattern.replace("\x0a-\x1f", "\x0b-\x1f"))
_FORMAT: Final = "%(levelname)s %(asctime)s %(message)s"
_TIME: Final = "%m-%d %H:%M:%S"
_ONCE_LIMIT: Final = 4096


def escape_control(text: str) -> str:
    """Give text on one line, with characters that could forge or hide log lines written as escapes."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class LineFormatter(logging.Formatter):
    """One record, one line; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escape_control(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return _UNSAFE_IN_TRACEBACK.sub(_escape, line) if record.exc_text or record.stack_info else line


class StderrHandler(logging.Handler):
    """Writes to the sys.stderr of the moment, so a prefix put on later applies. Write errors are only counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_dropped = 0
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        try:
            with self.around():
                sys.stderr.write(line)
                sys.stderr.flush()
        except (OSError, ValueError):
            self.num_dropped += 1


def setup_logging(level: str) -> None:
    """Send the records of `serve` at this level (debug, info, ...) and warnings of libraries to stderr."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, StderrHandler):
            root.removeHandler(handler)
    handler = StderrHandler()
    handler.setFormatter(LineFormatter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("serve").setLevel(level.upper())


def around_records(context: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Write every record inside this context, which for example takes a progress bar away; None ends that."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrHandler):
            handler.around = nullcontext if context is None else context


class PrefixedStream(io.TextIOBase):
    """A text stream that starts every line with a prefix; whole lines of several threads never mix."""

    def __init__(self, inner: TextIO, prefix: str) -> None:
        super().__init__()
        self.inner = inner
        self._prefix = prefix
        self._at_line_start = True
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if not text:
            return 0
        with self._lock:
            parts = _split_newlines(text)
            out: list[str] = []
            for part in parts:
                if self._at_line_start:
                    out.append(self._prefix)
                out.append(part)
                self._at_line_start = part.endswith("\n")
            self.inner.write("".join(out))
        return len(text)

    def flush(self) -> None:
        self.inner.flush()

    def fileno(self) -> int:
        return self.inner.fileno()

    def isatty(self) -> bool:
        return self.inner.isatty()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed declares a plain attribute
        return self.inner.encoding


def _split_newlines(text: str) -> list[str]:
    lines = text.split("\n")
    parts = [line + "\n" for line in lines[:-1]]
    return [*parts, lines[-1]] if lines[-1] else parts


def decorate_process(name: str, *, color: bool, title: bool = False) -> None:
    """Start every line on stdout and stderr with "(name pid=...) ", in cyan on a terminal if color is wanted.

    With title the process is called SERVE::name in ps. Calling again replaces the prefix.
    """
    sys.stdout = _decorated(sys.stdout, name, color)
    sys.stderr = _decorated(sys.stderr, name, color)
    if title:
        setproctitle.setproctitle(TITLE_PREFIX + name)


def _decorated(stream: TextIO, name: str, color: bool) -> TextIO:
    inner = stream.inner if isinstance(stream, PrefixedStream) else stream
    prefix = f"({name} pid={os.getpid()})"
    prefix = f"{_CYAN}{prefix}{_RESET} " if color and inner.isatty() else f"{prefix} "
    return PrefixedStream(inner, prefix)  # type: ignore[return-value]  # TextIOBase has the methods of TextIO


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message the first time it is seen; the set of messages seen is bounded."""
    _emit_once(logger.name, level, message)


@functools.lru_cache(maxsize=_ONCE_LIMIT)
def _emit_once(logger_name: str, level: int, message: str) -> None:
    logging.getLogger(logger_name).log(level, "%s", message)
