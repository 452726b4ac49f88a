"""Gives memory that the start of a process used back to the system."""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Return what the allocator holds and nobody uses. With another C library than glibc, do nothing."""
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(ctypes.c_size_t(0))
