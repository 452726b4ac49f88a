"""How far a piece of work is, for the person who started it: a bar on stderr, or now and then a line in the log."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TextIO

from tqdm import tqdm

from serve.log import PrefixedStream, around_records

log = logging.getLogger(__name__)

LOG_SECONDS: Final = 10.0
_COLUMNS: Final = 80
_LINES: Final = 24


class Progress(Protocol):
    """Counts finished pieces of work."""

    def advance(self) -> None:
        """Count one piece."""

    def close(self) -> None:
        """Leave what is shown as it stands."""


class NoProgress:
    """Shows nothing."""

    def advance(self) -> None:
        """Ignore the piece."""

    def close(self) -> None:
        """Ignore the end."""


class ProgressBar:
    """A bar on stderr. Pieces that were done before count for the bar, not for its rate.

    Records of the server's own log are written above the bar while it is there.
    """

    def __init__(self, total: int, title: str, *, unit: str, num_before: int = 0) -> None:
        # The bar's line has no prefix: it is drawn over and over, so a prefix would stay in front of its remains.
        stream = sys.stderr.inner if isinstance(sys.stderr, PrefixedStream) else sys.stderr
        columns, lines = _shape_of(stream)
        self._bar = tqdm(
            total=total, initial=num_before, desc=title, unit=unit, file=stream, ncols=columns, nrows=lines
        )
        around_records(self._cleared)

    def advance(self) -> None:
        """Count one piece."""
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands. May be called again."""
        around_records(None)
        self._bar.close()

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """Take the bar away for a while; other threads that draw it wait."""
        with tqdm.get_lock():
            self._bar.clear(nolock=True)
            try:
                yield
            finally:
                self._bar.refresh(nolock=True)


def _shape_of(stream: TextIO) -> tuple[int | None, int | None]:
    """Give columns and lines for terminals that claim to have none; None where the terminal's own are used."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None, None
    return None if size.columns > 0 else _COLUMNS, None if size.lines > 0 else _LINES


class ProgressLines:
    """Lines in the log, at most one in period seconds; for output that is no terminal."""

    def __init__(self, total: int, unit: str, *, num_before: int = 0, period: float = LOG_SECONDS) -> None:
        self._total = total
        self._unit = unit
        self._num_done = num_before
        self._period = period
        self._logged_at = time.monotonic()

    def advance(self) -> None:
        """Count one piece."""
        self._num_done += 1
        if time.monotonic() - self._logged_at >= self._period:
            self._logged_at = time.monotonic()
            log.info("%d of %d %s", self._num_done, self._total, self._unit)

    def close(self) -> None:
        """Say nothing more: the end has its own line."""
