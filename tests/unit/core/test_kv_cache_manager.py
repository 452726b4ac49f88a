"""Cache allocation and prefix reuse, block by block. Blocks hold 16 tokens."""

from __future__ import annotations

import pytest

from serve.core.kv_cache_manager import KVCacheManager, max_blocks_per_request
from serve.core.request import Request
from serve.sampling_params import SamplingParams
from tests.unit.core.scripted import make_kv, make_request


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[int]:
    """Admit a request with its hits and compute some (default: all) of its other tokens; gives its block ids."""
    hits = kv.get_computed_blocks(request)
    num_new = (num_tokens or request.num_tokens) - len(hits) * kv.block_size
    assert kv.allocate_slots(request, num_new, hit_blocks=hits) is not None
    request.num_computed_tokens = len(hits) * kv.block_size + num_new
    return [block.block_id for block in kv.blocks_of(request.req_id)]


def num_hit_tokens(kv: KVCacheManager, request: Request) -> int:
    return len(kv.get_computed_blocks(request)) * kv.block_size


@pytest.mark.parametrize(
    ("prompt_len", "expected"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (47, 32), (48, 32), (160, 144)]
)
def test_an_equal_prompt_hits_all_full_blocks_but_leaves_a_token_to_compute(prompt_len: int, expected: int) -> None:
    kv = make_kv()
    first = make_request("a", prompt_len)
    compute(kv, first)
    second = make_request("b", first.all_token_ids.copy())
    assert num_hit_tokens(kv, second) == expected == (prompt_len - 1) // 16 * 16


def test_a_prompt_that_differs_in_the_third_block_hits_two() -> None:
    kv = make_kv()
    first = make_request("a", 64)
    compute(kv, first)
    other = first.all_token_ids.copy()
    other[40] += 1
    assert num_hit_tokens(kv, make_request("b", other)) == 32


def test_salts_separate_and_equal_salts_share() -> None:
    kv = make_kv()
    prompt = make_request("a", 40).all_token_ids
    compute(kv, make_request("a", prompt, cache_salt="x"))
    assert num_hit_tokens(kv, make_request("b", prompt)) == 0
    assert num_hit_tokens(kv, make_request("c", prompt, cache_salt="y")) == 0
    assert num_hit_tokens(kv, make_request("d", prompt, cache_salt="x")) == 32


def test_a_request_may_ask_not_to_read_the_cache_and_still_fills_it() -> None:
    kv = make_kv()
    prompt = make_request("a", 40).all_token_ids
    unread = SamplingParams(skip_reading_prefix_cache=True)
    compute(kv, make_request("a", prompt, params=unread))
    assert num_hit_tokens(kv, make_request("b", prompt, params=unread)) == 0
    assert num_hit_tokens(kv, make_request("c", prompt)) == 32


def test_with_caching_off_nothing_is_named_or_hit() -> None:
    kv = make_kv(caching=False)
    prompt = make_request("a", 40).all_token_ids
    compute(kv, make_request("a", prompt))
    assert num_hit_tokens(kv, make_request("b", prompt)) == 0
    assert kv.pool.num_cached_blocks == 0


def test_hits_share_blocks_with_a_running_request() -> None:
    kv = make_kv()
    prompt = make_request("a", 40).all_token_ids
    first, second = compute(kv, make_request("a", prompt)), compute(kv, make_request("b", prompt))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [kv.pool.blocks[i].ref_cnt for i in (*first, second[2])] == [2, 2, 1, 1]


def test_blocks_are_taken_only_when_the_last_one_is_full() -> None:
    kv = make_kv()
    request = make_request("a", 15)
    compute(kv, request)
    added = []
    for token in range(34):
        request.all_token_ids.append(token)
        blocks = kv.allocate_slots(request, 1)
        assert blocks is not None
        added.append(len(blocks))
        request.num_computed_tokens += 1
    assert [i for i, n in enumerate(added) if n] == [1, 17, 33]


def test_generated_tokens_are_cached_too() -> None:
    kv = make_kv()
    request = make_request("a", 20)
    compute(kv, request)
    for token in range(13):
        request.all_token_ids.append(token)
        kv.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    text = request.all_token_ids.copy()
    kv.free(request)
    assert num_hit_tokens(kv, make_request("b", [*text, 1])) == 32


def test_a_block_with_an_unknown_token_is_committed_when_the_token_is_known() -> None:
    kv = make_kv()
    request = make_request("a", 31)
    compute(kv, request)
    request.num_output_placeholders = 1
    kv.allocate_slots(request, 1)
    request.num_computed_tokens += 1
    assert kv.pool.num_cached_blocks == 1
    request.all_token_ids.append(5)
    request.num_output_placeholders = 0
    kv.commit(request, min(request.num_computed_tokens, request.num_tokens))
    assert kv.pool.num_cached_blocks == 2


def test_a_partial_block_is_never_cached() -> None:
    kv = make_kv()
    compute(kv, make_request("a", 40), num_tokens=31)
    assert kv.pool.num_cached_blocks == 1


def test_a_refusal_changes_nothing() -> None:
    kv = make_kv(num_blocks=5)
    prompt = make_request("a", 40).all_token_ids
    first = make_request("a", prompt)
    compute(kv, first)
    kv.free(first)
    second = make_request("b", [*prompt, *range(60)])
    hits = kv.get_computed_blocks(second)
    before = [block.block_id for block in kv.pool.free_queue]
    assert len(hits) == 2
    assert kv.allocate_slots(second, second.num_tokens - 32, hit_blocks=hits) is None
    assert [block.block_id for block in kv.pool.free_queue] == before
    assert kv.blocks_of("b") == []
    assert second.num_committed_blocks == 0


def test_free_hit_blocks_count_as_needed() -> None:
    kv = make_kv(num_blocks=5)
    prompt = make_request("a", 33).all_token_ids
    first = make_request("a", prompt)
    compute(kv, first)
    kv.free(first)
    # 4 usable blocks: 2 hits in the free queue plus 2 new ones fit, 3 new ones do not.
    fits = make_request("b", [*prompt[:32], *range(32)])
    assert kv.allocate_slots(fits, 32, hit_blocks=kv.get_computed_blocks(fits)) is not None
    kv.free(fits)
    exceeds = make_request("c", [*prompt[:32], *range(50, 83)])
    assert kv.allocate_slots(exceeds, 33, hit_blocks=kv.get_computed_blocks(exceeds)) is None


def test_full_sequence_admission_asks_for_room_for_all_known_tokens() -> None:
    kv = make_kv(num_blocks=5)
    request = make_request("a", 80)
    assert kv.allocate_slots(request, 16, full_sequence=True) is None
    blocks = kv.allocate_slots(request, 16, full_sequence=False)
    assert blocks is not None
    assert len(blocks) == 1


def test_reserved_blocks_stay_free() -> None:
    kv = make_kv(num_blocks=5)
    assert kv.allocate_slots(make_request("a", 48), 48, num_reserved_blocks=2) is None
    assert kv.allocate_slots(make_request("a", 48), 48, num_reserved_blocks=1) is not None


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    kv = make_kv(num_blocks=7)
    old, young = make_request("a", 49), make_request("bb", 33)
    for request in (old, young):
        compute(kv, request)
        kv.free(request)
    # 6 usable blocks: 3 + 2 cached, 1 free without content. Two new blocks evict the tail of the older prefix.
    taker = make_request("ccc", 32)
    compute(kv, taker)
    assert num_hit_tokens(kv, make_request("d", [*old.all_token_ids])) == 32
    assert num_hit_tokens(kv, make_request("e", [*young.all_token_ids])) == 32


def test_forgetting_takes_equal_content_out_of_the_cache_but_not_from_its_holders() -> None:
    kv = make_kv()
    request = make_request("a", 40)
    blocks = compute(kv, request)
    kv.forget(request)
    assert num_hit_tokens(kv, make_request("b", request.all_token_ids.copy())) == 0
    assert [kv.pool.blocks[i].ref_cnt for i in blocks] == [1, 1, 1]


def test_blocks_beyond_the_valid_tokens_leave_the_cache_when_freed() -> None:
    kv = make_kv()
    request = make_request("a", 64)
    compute(kv, request)
    kv.free(request, num_valid_tokens=32)
    assert num_hit_tokens(kv, make_request("b", request.all_token_ids.copy())) == 32
    assert kv.check_integrity() is None


def test_a_window_gives_back_blocks_that_no_later_token_reads() -> None:
    kv = make_kv(window=24)
    request = make_request("a", 64)
    compute(kv, request)
    request.all_token_ids.append(1)
    kv.allocate_slots(request, 1)
    # Token 64 reads positions 41 to 64, so blocks 0 and 1 (positions 0 to 31) go.
    table = [block.block_id for block in kv.blocks_of("a")]
    assert table[:2] == [0, 0]
    assert all(table[2:])
    assert kv.pool.num_blocks - 1 - kv.pool.num_free_blocks == 3
    assert kv.check_integrity() is None


def test_a_window_needs_only_the_cached_blocks_it_looks_at() -> None:
    kv = make_kv(window=24)
    request = make_request("a", 81)
    compute(kv, request)
    kv.free(request)
    again = make_request("b", request.all_token_ids.copy())
    ids = [block.block_id for block in kv.get_computed_blocks(again)]
    # ceil(23 / 16) = 2 blocks before the end of the hit; the three before them are not needed.
    assert [bool(i) for i in ids] == [False, False, False, True, True]


def test_a_window_hit_ends_where_enough_blocks_before_it_are_cached() -> None:
    kv = make_kv(window=24)
    request = make_request("a", 97)
    compute(kv, request)
    blocks = list(kv.blocks_of("a"))
    kv.free(request)
    for index in (1, 4):
        kv.pool.uncache(blocks[index])
    again = make_request("b", request.all_token_ids.copy())
    ids = [block.block_id for block in kv.get_computed_blocks(again)]
    assert ids == [0, 0, blocks[2].block_id, blocks[3].block_id]


def test_a_short_cached_start_is_a_window_hit_too() -> None:
    kv = make_kv(window=64)
    request = make_request("a", 65)
    compute(kv, request)
    blocks = list(kv.blocks_of("a"))
    kv.free(request)
    kv.pool.uncache(blocks[2])
    again = make_request("b", request.all_token_ids.copy())
    assert kv.get_computed_blocks(again) == blocks[:2]


@pytest.mark.parametrize(
    ("num_tokens", "window", "expected"),
    [(1, None, 1), (16, None, 1), (17, None, 2), (1000, 24, 19), (100, 24, 7), (10, 24, 1)],
)
def test_blocks_a_request_holds_at_once(num_tokens: int, window: int | None, expected: int) -> None:
    # With a window: ceil((24 - 1 + 256) / 16) + 1 = 19.
    assert max_blocks_per_request(num_tokens, 16, window=window, max_step_tokens=256) == expected
