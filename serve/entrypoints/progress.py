"""A progress bar on stderr, for work that a person started and waits for."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Progress:
    """Counts finished pieces of work; shows nothing unless it is enabled."""

    def __init__(self, total: int, title: str, *, unit: str, is_shown: bool) -> None:
        self._bar = tqdm(total=total, desc=title, unit=unit, file=sys.stderr) if is_shown else None

    def advance(self) -> None:
        """Count one piece."""
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
