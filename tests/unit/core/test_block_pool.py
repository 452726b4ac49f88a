"""The block pool: order of reuse, reference counts, cached content, and the integrity check."""

from __future__ import annotations

import pytest

from serve.core.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def test_a_fresh_pool_hands_out_blocks_in_id_order_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert [block.block_id for block in pool.take(4)] == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0


def test_the_queue_removes_from_the_middle_and_from_both_ends() -> None:
    blocks = [KVCacheBlock(i) for i in range(5)]
    queue = FreeBlockQueue(blocks)
    for index in (2, 0, 4):
        queue.remove(blocks[index])
    assert [block.block_id for block in queue] == [1, 3]
    assert queue.num_blocks == 2


def test_the_queue_takes_a_block_only_once() -> None:
    block = KVCacheBlock(1)
    queue = FreeBlockQueue([block])
    with pytest.raises(AssertionError, match="already in the free queue"):
        queue.append(block)


def test_taking_from_an_empty_pool_is_our_own_mistake() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError, match="empty"):
        pool.take(1)


def test_cached_blocks_are_reused_last_and_the_tail_of_a_prefix_before_its_head() -> None:
    pool = BlockPool(6)
    blocks = pool.take(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.cache_block(block, name)
    pool.free(blocks)
    assert free_ids(pool) == [4, 5, 3, 2, 1]


def test_blocks_without_a_hash_are_reused_first() -> None:
    pool = BlockPool(6)
    blocks = pool.take(3)
    pool.cache_block(blocks[0], b"a")
    pool.free(blocks)
    assert free_ids(pool) == [2, 3, 4, 5, 1]


def test_a_cached_block_can_be_hit_until_it_is_taken_for_new_content() -> None:
    pool = BlockPool(3)
    (block, _) = pool.take(2)
    pool.cache_block(block, b"a")
    pool.free([block])
    assert pool.get_cached_block(b"a") is block
    assert pool.take(1) == [block]
    assert pool.get_cached_block(b"a") is None
    assert block.block_hash is None


def test_a_hit_takes_a_free_block_out_of_the_queue_and_shares_a_held_one() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.cache_block(blocks[0], b"a")
    pool.cache_block(blocks[1], b"b")
    pool.free(blocks[:1])
    pool.touch(blocks)
    assert [block.ref_cnt for block in blocks] == [1, 2]
    assert free_ids(pool) == [3]


def test_a_shared_block_is_free_only_after_the_last_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 1
    pool.free(blocks)
    assert pool.num_free_blocks == 2


def test_freeing_twice_is_our_own_mistake() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_the_null_block_is_neither_held_nor_freed_nor_cached() -> None:
    pool = BlockPool(3)
    pool.touch([pool.null_block])
    pool.free([pool.null_block])
    assert pool.null_block.ref_cnt == 0
    assert pool.num_free_blocks == 2
    with pytest.raises(AssertionError, match="null block"):
        pool.cache_block(pool.null_block, b"a")


def test_equal_content_in_two_blocks_stays_findable_when_one_goes() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.cache_block(first, b"a")
    pool.cache_block(second, b"a")
    pool.uncache(first)
    assert pool.get_cached_block(b"a") is second


def test_usage_counts_held_blocks_only() -> None:
    pool = BlockPool(5)
    blocks = pool.take(2)
    pool.cache_block(blocks[0], b"a")
    assert pool.usage == 0.5
    pool.free(blocks)
    assert pool.usage == 0.0
    assert pool.num_cached_blocks == 1


def test_reset_forgets_everything_when_no_block_is_held() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.cache_block(blocks[0], b"a")
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a") is blocks[0]
    pool.free(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a") is None
    assert pool.check_integrity({}) is None


def test_the_check_finds_a_leaked_block() -> None:
    pool = BlockPool(4)
    pool.take(1)
    assert pool.check_integrity({1: 1}) is None
    assert pool.check_integrity({}) == "block pool broken: block 1 has ref_cnt 1, 0 holders"


def test_the_check_finds_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.free_queue.pop()
    assert pool.check_integrity({}) == "block pool broken: 2 free (counted 2) + 0 used != 3 usable"


def test_the_check_finds_a_wrong_map_entry() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.cache_block(block, b"a")
    block.block_hash = b"b"
    problem = pool.check_integrity({1: 1})
    assert problem == "block pool broken: the map entry of block 1 does not match its hash"
