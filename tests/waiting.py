"""Waiting for something outside this process, with a limit. The only place of the tests that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.02

_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], limit_s: float, what: str) -> _T:
    """Give the first true value of condition(); fail with `what` after limit_s seconds."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(POLL_S)
    return value


async def async_wait_until(condition: Callable[[], _T], limit_s: float, what: str) -> _T:
    """Do the same and leave the event loop running meanwhile."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        await asyncio.sleep(POLL_S)
    return value
