"""Phase 6 of 11: which cache blocks each request holds, and which it can reuse.

Full blocks are offered to the prefix cache when they are scheduled, before the forward pass ran: steps run in order
on one device, and inside a pass every layer writes all K and V before it reads any, so a request scheduled later,
even in the same step, finds them written. Blocks with tokens that are not known yet wait until they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from serve.core.block_hash import BlockHasher
from serve.core.block_pool import BlockPool, KVCacheBlock
from serve.core.request import Request

_NO_BLOCKS: Final[list[KVCacheBlock]] = []


def cdiv(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def max_blocks_per_request(num_tokens: int, block_size: int, *, window: int | None, max_step_tokens: int) -> int:
    """Give the most blocks a request of num_tokens holds at once.

    With a sliding window a step holds the window before its first token and the step's own tokens; one block more
    because neither end needs to lie on a block's edge.
    """
    full = cdiv(num_tokens, block_size)
    if window is None:
        return full
    return min(full, cdiv(window - 1 + max_step_tokens, block_size) + 1)


class KVCacheManager:
    """Block tables of the running requests over one pool.

    hasher None switches prefix caching off. sliding_window (tokens) is set when every layer uses it.
    max_step_tokens bounds the tokens of one request in a step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        max_step_tokens: int,
        hasher: BlockHasher | None,
        sliding_window: int | None = None,
        watermark: float = 0.0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_watermark_blocks = int(watermark * num_blocks)
        self._max_model_len = max_model_len
        self._max_step_tokens = max_step_tokens
        self._hasher = hasher
        self._window = sliding_window
        self._tables: dict[str, list[KVCacheBlock]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that hold a block table."""
        return len(self._tables)

    def blocks_of(self, req_id: str) -> list[KVCacheBlock]:
        """Give the block table of a request (not a copy); empty for one that holds none."""
        return self._tables.get(req_id, _NO_BLOCKS)

    def looks_up(self, request: Request) -> bool:
        """Tell whether the prefix cache may serve a request at all."""
        return self._hasher is not None and not request.sampling_params.skip_reading_prefix_cache

    def hash_prompt(self, request: Request) -> None:
        """Name the full blocks known so far; called ahead of time on the input thread."""
        if self._hasher is not None:
            self._hasher.extend(request.block_hashes, request.all_token_ids, request.cache_salt, request.prompt_embeds)

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Find the longest cached prefix of a request; the blocks are not held yet.

        At least one token is left to compute, because only a computed token gives logits. Under a sliding window
        the null block stands where no later token looks.
        """
        if not self.looks_up(request):
            return _NO_BLOCKS
        self.hash_prompt(request)
        max_hits = (request.num_tokens - 1) // self.block_size
        if self._window is not None:
            return self._find_window_hit(
                request.block_hashes[:max_hits], max(1, cdiv(self._window - 1, self.block_size))
            )
        hits: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[:max_hits]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        hit_blocks: Sequence[KVCacheBlock] = (),
        full_sequence: bool = False,
        num_reserved_blocks: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Reserve cache space for the next tokens of a request.

        num_new_tokens excludes the prefix-cache hit, which is given as hit_blocks and only for a request without a
        table. full_sequence also demands that all known tokens could be held. Returns the added blocks in order
        (hits excluded), or None when the pool would be left with fewer than num_reserved_blocks; None leaves the
        pool and the request untouched, so the caller may preempt and retry. A caller that wants one token may leave the
        call out while the request has a slot for it (num_slots): its blocks are committed when the token is known.
        """
        table = self._tables.get(request.req_id, _NO_BLOCKS)
        num_computed = request.num_computed_tokens + len(hit_blocks) * self.block_size
        if self._window is not None:
            self._free_outside_window(table, num_computed - request.num_output_placeholders)
        last_token = min(num_computed + num_new_tokens, self._max_model_len)
        num_new_blocks = cdiv(last_token, self.block_size) - len(table) - len(hit_blocks)
        new_blocks: list[KVCacheBlock] = _NO_BLOCKS
        if num_new_blocks > 0 or hit_blocks:
            num_needed = max(0, num_new_blocks)
            if full_sequence:
                num_real_hits = sum(block is not self.pool.null_block for block in hit_blocks)
                num_needed = max(num_needed, self._num_blocks_for(request.num_tokens) - num_real_hits)
            if num_needed + num_reserved_blocks > self.pool.num_free_blocks - self._count_revived(hit_blocks):
                return None
            self.pool.touch(hit_blocks)
            new_blocks = self.pool.take(max(0, num_new_blocks))
            table = self._tables.setdefault(request.req_id, [])
            table.extend((*hit_blocks, *new_blocks))
            request.num_slots = len(table) * self.block_size
            request.num_committed_blocks = max(request.num_committed_blocks, len(hit_blocks))
        self.commit(request, min(num_computed + num_new_tokens, request.num_tokens))
        return new_blocks

    def commit(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks of the first num_tokens (known, scheduled) tokens to the prefix cache."""
        num_full = num_tokens // self.block_size
        if self._hasher is None or num_full <= request.num_committed_blocks:
            return
        if len(request.block_hashes) < num_full:
            self.hash_prompt(request)
        table = self._tables[request.req_id]
        for index in range(request.num_committed_blocks, num_full):
            if table[index] is not self.pool.null_block:
                self.pool.cache_block(table[index], request.block_hashes[index])
        request.num_committed_blocks = num_full

    def free(self, request: Request, *, num_valid_tokens: int | None = None) -> None:
        """Give back all blocks of a request; no effect on one that holds none.

        num_valid_tokens: only blocks of that many leading tokens stay in the prefix cache (None: all that are).
        """
        table = self._tables.pop(request.req_id, _NO_BLOCKS)
        if num_valid_tokens is not None:
            for block in table[num_valid_tokens // self.block_size :]:
                self.pool.uncache(block)
        self.pool.free(table)
        request.num_committed_blocks = request.num_slots = 0

    def forget(self, request: Request) -> None:
        """Take everything equal to what a request computed out of the prefix cache; it keeps its blocks."""
        for block_hash in request.block_hashes:
            while (block := self.pool.get_cached_block(block_hash)) is not None:
                self.pool.uncache(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while any block is in use."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self) -> str | None:
        """Check the pool against the block tables; None when sound, else the broken numbers."""
        refs = Counter(block.block_id for table in self._tables.values() for block in table)
        del refs[self.pool.null_block.block_id]
        return self.pool.check_integrity(refs)

    def _count_revived(self, hit_blocks: Sequence[KVCacheBlock]) -> int:
        """Count the hits that a hold would take out of the free queue."""
        return sum(block.ref_cnt == 0 and block is not self.pool.null_block for block in hit_blocks)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return max_blocks_per_request(
            num_tokens, self.block_size, window=self._window, max_step_tokens=self._max_step_tokens
        )

    def _find_window_hit(self, block_hashes: Sequence[bytes], num_needed: int) -> list[KVCacheBlock]:
        """Find the last place where the window before it is cached; or the whole cached prefix, if shorter."""
        hits = [self.pool.null_block] * len(block_hashes)
        run = 0
        for index in range(len(block_hashes) - 1, -1, -1):
            block = self.pool.get_cached_block(block_hashes[index])
            if block is None:
                run = 0
                continue
            if run == 0:
                del hits[index + 1 :]
            hits[index] = block
            run += 1
            if run >= num_needed:
                return hits
        return hits[:run]

    def _free_outside_window(self, table: list[KVCacheBlock], num_processed: int) -> None:
        """Replace blocks that no later token reads by the null block and give them back."""
        assert self._window is not None, "no window"
        null = self.pool.null_block
        last = max(0, num_processed - self._window + 1) // self.block_size
        first = min(last, len(table))
        end = first
        while first > 0 and table[first - 1] is not null:
            first -= 1
        if first < end:
            outside = table[first:end]
            table[first:end] = [null] * len(outside)
            self.pool.free(outside)
