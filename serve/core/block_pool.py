"""Phase 6 of 11: the cache blocks, their reference counts, the free queue and the map of cached prefixes.

A block is in exactly one place: the free queue (ref_cnt 0) or in use (ref_cnt > 0). Block 0 is the null block; it
stands where a request needs no block and is in neither place. A free block keeps its hash, and can be hit, until it
is taken for new content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

NULL_BLOCK_ID: Final = 0


class KVCacheBlock:
    """One block of the pool; the free-queue links live in the block, so queue operations allocate nothing."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(id={self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


class FreeBlockQueue:
    """Doubly linked queue of free blocks between two fake ends; front is reused first. Every operation is O(1)."""

    __slots__ = ("_head", "_tail", "num_blocks")

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: reused last."""
        last = self._tail.prev_free
        assert last is not None, "the free queue lost its end"
        self._link(last, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: reused first."""
        first = self._head.next_free
        assert first is not None, "the free queue lost its start"
        self._link(self._head, block, first)

    def pop(self) -> KVCacheBlock:
        """Take the block at the front."""
        block = self._head.next_free
        assert block is not None, "the free queue lost its start"
        assert block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"block {block.block_id} is not in the free queue"
        assert after is not None, f"block {block.block_id} is not in the free queue"
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        assert block.next_free is None, f"block {block.block_id} is already in the free queue"
        block.prev_free = before
        block.next_free = after
        before.next_free = block
        after.prev_free = block
        self.num_blocks += 1


class BlockPool:
    """All cache blocks of the engine. num_blocks counts the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        # Equal content computed twice gives two blocks under one hash; block tables are append-only, so both stay.
        self._cached: dict[bytes, dict[int, KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self.free_queue.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that carry a hash, in use or free."""
        return sum(len(same) for same in self._cached.values())

    @property
    def usage(self) -> float:
        """Share of usable blocks held by requests, 0 to 1."""
        usable = self.num_blocks - 1
        return 1.0 - self.num_free_blocks / usable if usable else 0.0

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """Give a block with this content, or None. The block is not taken."""
        same = self._cached.get(block_hash)
        return next(iter(same.values())) if same else None

    def cache_block(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full block findable under its hash."""
        assert block.block_hash is None, f"block {block.block_id} already has a hash"
        assert block is not self.null_block, "the null block cannot be cached"
        block.block_hash = block_hash
        self._cached.setdefault(block_hash, {})[block.block_id] = block

    def uncache(self, block: KVCacheBlock) -> None:
        """Forget the content of a block; no effect on who holds it."""
        if block.block_hash is None:
            return
        same = self._cached[block.block_hash]
        del same[block.block_id]
        if not same:
            del self._cached[block.block_hash]
        block.block_hash = None

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for new content from the front of the free queue; what they cached is forgotten."""
        taken = [self.free_queue.pop() for _ in range(num_blocks)]
        for block in taken:
            self.uncache(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks that were hit."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one hold of each block of a request, given in table order.

        The tail goes first, so the end of a prefix is evicted before its start. Blocks without a hash can never be
        hit and go to the front of the queue.
        """
        for block in reversed(blocks):
            if block is self.null_block:
                continue
            assert block.ref_cnt > 0, f"block {block.block_id} was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self.free_queue.prepend(block)
                else:
                    self.free_queue.append(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing forgotten, while any block is in use."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for same in self._cached.values():
            for block in same.values():
                block.block_hash = None
        self._cached.clear()
        return True

    def check_integrity(self, expected_refs: Mapping[int, int]) -> str | None:
        """Compare the pool with what its users hold; None when sound, else the broken numbers.

        expected_refs maps block id to the number of block tables that contain it.
        """
        free_ids = {block.block_id for block in self.free_queue}
        used = [block for block in self.blocks[1:] if block.ref_cnt > 0]
        if len(free_ids) != self.num_free_blocks or len(free_ids) + len(used) != self.num_blocks - 1:
            return (
                f"block pool broken: {len(free_ids)} free (counted {self.num_free_blocks}) + {len(used)} used != "
                f"{self.num_blocks - 1} usable"
            )
        if NULL_BLOCK_ID in free_ids or self.null_block.ref_cnt or self.null_block.block_hash is not None:
            return "block pool broken: the null block is free, held or cached"
        for block in self.blocks[1:]:
            expected = expected_refs.get(block.block_id, 0)
            if block.ref_cnt != expected or (block.ref_cnt == 0) != (block.block_id in free_ids):
                return f"block pool broken: block {block.block_id} has ref_cnt {block.ref_cnt}, {expected} holders"
        return self._check_cached()

    def _check_cached(self) -> str | None:
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        if num_hashed != self.num_cached_blocks:
            return f"block pool broken: {num_hashed} hashed blocks, {self.num_cached_blocks} in the map"
        for block_hash, same in self._cached.items():
            for block_id, block in same.items():
                if block.block_id != block_id or block.block_hash != block_hash:
                    return f"block pool broken: the map entry of block {block_id} does not match its hash"
        return None
