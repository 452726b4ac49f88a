"""Phase 5 of 11: blocks about to be computed, for which new requests with the same prefix wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve.core.block_pool import KVCacheBlock
from serve.core.request import Request


class ComingBlocks:
    """Names of full blocks that later steps of running requests compute, each with the most urgent one's priority."""

    __slots__ = ("_has_priorities", "_urgency")

    def __init__(self, running: Iterable[Request], *, has_priorities: bool) -> None:
        self._has_priorities = has_priorities
        self._urgency: dict[bytes, int] = {}
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """Count in the blocks of a running request that are known and not yet scheduled."""
        priority = self._priority(request)
        for block_hash in request.block_hashes[request.num_committed_blocks :]:
            self._urgency[block_hash] = min(priority, self._urgency.get(block_hash, priority))

    def are_worth_waiting_for(self, request: Request, hit_blocks: Sequence[KVCacheBlock]) -> bool:
        """Tell whether the block behind a request's prefix-cache hit is coming; nobody waits for the less urgent."""
        index = len(hit_blocks)
        if index >= len(request.block_hashes):
            return False
        priority = self._urgency.get(request.block_hashes[index])
        return priority is not None and priority <= self._priority(request)

    def _priority(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0
