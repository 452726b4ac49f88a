"""Runs the command line: `python -m serve` is the same as `serve`."""

from __future__ import annotations

import sys

from serve.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
