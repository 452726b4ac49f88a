"""Many pieces of work, a bounded number of them under way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from serve.config import ServeConfig

# Requests under way for each one that can run: the engine always has the next ones waiting.
_PER_RUNNING: Final = 2
_T = TypeVar("_T")


def window_size(config: ServeConfig) -> int:
    """Give how many requests should be under way at once for full use of the engine."""
    max_num_seqs = config.engine.scheduler.max_num_seqs
    assert max_num_seqs is not None, "max_num_seqs must be resolved"
    return _PER_RUNNING * max_num_seqs


async def run_window(items: Iterable[_T], work: Callable[[_T], Awaitable[None]], *, size: int) -> None:
    """Do the work for every item, taking them in order as there is room; the first error cancels the rest."""
    remaining = iter(items)

    async def pull() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                group.create_task(pull())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
