"""Log lines name their process and cannot be forged."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve.log import PrefixedStream, StderrHandler, decorate_process, escape_control, log_once, setup_logging
from tests.source_tree import ROOT


@contextmanager
def captured(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    """Give the process these streams, and put streams and loggers back afterwards.

    Not a fixture: pytest exchanges the streams between set-up and test.
    """
    root, serve = logging.getLogger(), logging.getLogger("serve")
    before = sys.stdout, sys.stderr, root.level, serve.level, list(root.handlers)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr, root_level, serve_level, root.handlers[:] = before
        root.setLevel(root_level)
        serve.setLevel(serve_level)


def test_every_line_starts_with_name_and_pid_however_it_is_written() -> None:
    out, err = io.StringIO(), io.StringIO()
    with captured(out, err):
        decorate_process("EngineCore", color=True)
        sys.stdout.write("one\ntwo")
        sys.stdout.write(" more\n\n")
        sys.stderr.write("err")
        prefix = f"(EngineCore pid={os.getpid()}) "
    assert out.getvalue() == f"{prefix}one\n{prefix}two more\n{prefix}\n"
    assert err.getvalue() == f"{prefix}err"


def test_decorating_again_replaces_the_prefix() -> None:
    out, err = io.StringIO(), io.StringIO()
    with captured(out, err):
        decorate_process("Worker", color=False)
        decorate_process("Worker_TP0", color=False)
        sys.stdout.write("x\n")
    assert out.getvalue() == f"(Worker_TP0 pid={os.getpid()}) x\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "color", "is_cyan"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)]
)
def test_the_prefix_is_cyan_on_a_terminal_only_and_only_if_wanted(
    stream: type[io.StringIO], color: bool, is_cyan: bool
) -> None:
    inner = stream()
    with captured(inner, io.StringIO()):
        decorate_process("A", color=color)
        sys.stdout.write("x\n")
    assert inner.getvalue().startswith("\x1b[36m(A pid=") is is_cyan
    assert inner.getvalue().endswith("\x1b[0m x\n" if is_cyan else ") x\n")


def test_a_traceback_has_the_prefix_on_every_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    with captured(out, err):
        decorate_process("EngineCore", color=False)
        setup_logging("info")
        try:
            raise ValueError("two\nlines \x1b[31m")
        except ValueError:
            logging.getLogger("serve.core").exception("step failed")
    lines = err.getvalue().splitlines()
    assert len(lines) > 4
    assert all(line.startswith(f"(EngineCore pid={os.getpid()}) ") for line in lines)
    assert "\x1b" not in err.getvalue()


def test_one_record_is_one_line_and_shows_control_characters() -> None:
    out, err = io.StringIO(), io.StringIO()
    with captured(out, err):
        setup_logging("info")
        forged = "a\nERROR forged\r\x1b[2Jb\u202ec\u2028\ud800"
        logging.getLogger("serve.x").info("id=%s", forged)
    assert err.getvalue().endswith("id=a\\x0aERROR forged\\x0d\\x1b[2Jb\\u202ec\\u2028\\ud800\n")
    assert err.getvalue().count("\n") == 1


def test_ordinary_text_is_left_alone() -> None:
    text = "tab\t caf\u00e9 \u65e5\u672c \U0001f600 \\n"
    assert escape_control(text) == text


def test_levels_hold_for_serve_and_libraries_only_warn() -> None:
    out, err = io.StringIO(), io.StringIO()
    with captured(out, err):
        setup_logging("debug")
        setup_logging("info")
        logging.getLogger("serve.x").debug("hidden")
        logging.getLogger("library").info("hidden")
        logging.getLogger("library").warning("shown")
    assert [line.split()[0] for line in err.getvalue().splitlines()] == ["WARNING"]


def test_write_errors_are_counted_and_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    handler = StderrHandler()
    handler.handle(logging.LogRecord("serve", logging.INFO, __file__, 1, "x", None, None))
    assert handler.num_dropped == 1


def test_a_message_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="serve.once")
    logger = logging.getLogger("serve.once")
    for _ in range(3):
        log_once(logger, logging.WARNING, "said once: 100%")
    log_once(logger, logging.WARNING, "another")
    assert [r.getMessage() for r in caplog.records] == ["said once: 100%", "another"]


def test_a_stream_passes_on_what_it_is_asked(tmp_path: object) -> None:
    inner = io.StringIO()
    stream = PrefixedStream(inner, "p ")
    assert stream.write("") == 0
    assert stream.write("ab\n") == 3
    assert stream.writable()
    assert not stream.isatty()
    assert inner.getvalue() == "p ab\n"


def test_the_title_names_the_process() -> None:
    code = (
        "import sys, setproctitle; from serve.log import decorate_process; decorate_process('EngineCore', color=False, "
        "title=True); sys.stdout.write(setproctitle.getproctitle())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(") SERVE::EngineCore"), done.stderr
