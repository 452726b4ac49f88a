"""How far a batch is: a bar that log lines do not tear, and lines where there is no terminal."""

from __future__ import annotations

import io
import logging
import os
import sys

import pytest

from serve.entrypoints.progress import ProgressBar, ProgressLines
from serve.log import LineFormatter, PrefixedStream, StderrHandler

log = logging.getLogger("serve.entrypoints.progress")


def screen(written: str) -> list[str]:
    """Give the lines that a terminal shows after this: a carriage return goes back, what follows covers the line."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_log_lines_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", PrefixedStream(terminal, "(Batch) "))
    handler = StderrHandler()
    handler.setFormatter(LineFormatter())
    logging.getLogger().addHandler(handler)
    try:
        bar = ProgressBar(45, "batch", unit="req", num_before=40)
        log.warning("first")
        bar.advance()
        log.warning("second")
        bar.close()
        log.warning("third")
    finally:
        logging.getLogger().removeHandler(handler)
    first, second, drawn, third, rest = screen(terminal.getvalue())
    for line, word in ((first, "first"), (second, "second"), (third, "third")):
        assert line.startswith("(Batch) WARNING")
        assert line.endswith(word)
    assert drawn.startswith("batch:  91%|")
    assert "41/45" in drawn
    assert rest == ""


def test_lines_of_an_earlier_run_are_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    ProgressBar(45, "batch", unit="req", num_before=40).close()
    assert "40/45" in terminal.getvalue()
    assert "?req/s" in terminal.getvalue()


def test_a_terminal_without_a_width_has_a_bar_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()  # a fresh one has no columns
    assert os.get_terminal_size(writer).columns == 0
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        ProgressBar(45, "batch", unit="req").close()
        shown = ""
        while "\n" not in shown:  # the end of the bar
            shown += os.read(reader, 4096).decode()
    os.close(reader)
    bar = screen(shown)[0]
    assert bar.startswith("batch:   0%|")
    assert len(bar) <= 80


def test_without_a_terminal_the_log_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="serve"):
        often, seldom = (ProgressLines(45, "lines", num_before=40, period=period) for period in (0.0, 3600.0))
        for lines in (often, seldom):
            lines.advance()
            lines.advance()
            lines.close()
    assert caplog.messages == ["41 of 45 lines", "42 of 45 lines"]
