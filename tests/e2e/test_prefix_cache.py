"""What the prefix cache reuses, seen through usage and metrics (K1 to K10). Blocks hold 16 tokens."""

from __future__ import annotations

import random
from functools import partial

from tests.e2e.client import (
    cached_tokens,
    choice_of,
    complete,
    expect_refusal,
    post,
    text_of,
    together,
)
from tests.e2e.server import Server
from tests.e2e.test_scheduler import background

COMPLETIONS = "/v1/completions"


def fresh_ids(count: int) -> list[int]:
    """Give ids of ordinary tokens that no test has sent before."""
    source = random.SystemRandom()
    return [source.randrange(1000, 40000) for _ in range(count)]


def hits(server: Server, ids: list[int], **fields: object) -> int:
    """Give how many tokens of a prompt are found in the cache."""
    return cached_tokens(complete(server, ids, max_tokens=1, **fields))


def test_k1_a_repeated_prompt_hits_all_full_blocks_before_its_last_token(server: Server) -> None:
    for length in (1, 16, 17, 47, 80):
        ids = fresh_ids(length)
        assert hits(server, ids) == 0
        assert hits(server, ids) == (length - 1) // 16 * 16


def test_k2_a_prompt_of_two_whole_blocks_recomputes_the_second(server: Server) -> None:
    ids = fresh_ids(32)
    hits(server, ids)
    assert hits(server, ids) == 16


def test_k3_prompts_that_differ_in_the_third_block_share_two(server: Server) -> None:
    ids = fresh_ids(80)
    other = [*ids[:40], ids[40] + 1, *ids[41:]]
    hits(server, ids)
    assert hits(server, other) == 32


def test_k4_salts_separate_and_share(server: Server) -> None:
    ids = fresh_ids(64)
    assert hits(server, ids, cache_salt="a") == 0
    assert hits(server, ids, cache_salt="b") == 0
    assert hits(server, ids) == 0
    assert hits(server, ids, cache_salt="a") == 48
    expect_refusal(post(server, COMPLETIONS, {"prompt": ids, "cache_salt": ""}), 400, "cache_salt")


def test_k5_a_second_turn_hits_prompt_and_generated_blocks(server: Server) -> None:
    """20 prompt tokens and 30 generated ones: 49 are computed (the last was only sampled), three full blocks."""
    prompt = fresh_ids(20)
    first = complete(server, prompt, max_tokens=30, ignore_eos=True, return_token_ids=True)
    generated = choice_of(first)["token_ids"]
    assert len(generated) == 30  # type: ignore[arg-type]
    assert hits(server, [*prompt, *generated, *fresh_ids(10)]) == 48  # type: ignore[misc]


def test_k6_prompt_logprobs_do_not_read_the_cache(server: Server) -> None:
    ids = fresh_ids(48)
    fields = {"max_tokens": 1, "prompt_logprobs": 1}
    first = complete(server, ids, **fields)
    second = complete(server, ids, **fields)
    table = choice_of(second)["prompt_logprobs"]
    assert cached_tokens(second) == 0
    assert len(table) == 48  # type: ignore[arg-type]
    assert table[0] is None  # type: ignore[index]
    assert table == choice_of(first)["prompt_logprobs"]
    assert hits(server, ids) == 32


def test_k7_the_least_recently_used_prefix_is_evicted_tail_first(tight: Server) -> None:
    """Of 40 blocks old, young and a filler take 4, 4 and 30; the last prompt takes the 2 left and 2 of old's tail."""
    old, young = fresh_ids(64), fresh_ids(64)
    for ids in (old, young, fresh_ids(480), fresh_ids(64)):
        assert hits(tight, ids) == 0
    assert hits(tight, old) == 32


def test_k7_a_whole_old_prefix_goes_before_a_younger_one(tight: Server) -> None:
    """As above with a last prompt of 6 blocks: it takes the 2 free ones and all 4 of old."""
    old, young = fresh_ids(64), fresh_ids(64)
    for ids in (old, young, fresh_ids(480), fresh_ids(96)):
        assert hits(tight, ids) == 0
    assert hits(tight, young) == 48
    assert hits(tight, old) == 0


def test_k8_reset_fails_while_blocks_are_held_and_empties_the_idle_cache(tight: Server) -> None:
    ids = fresh_ids(64)
    hits(tight, ids)
    with background(tight, prompt="Once upon", max_tokens=300, ignore_eos=True) as running:
        assert tight.client.post("/reset_prefix_cache").json() == {"success": False}
        running.result(30)
    assert hits(tight, ids) == 48
    tight.wait_idle()
    assert tight.client.post("/reset_prefix_cache").json() == {"success": True}
    assert hits(tight, ids) == 0


def test_k9_equal_prompts_sent_at_once_share_and_answer_alike(server: Server) -> None:
    ids = fresh_ids(64)
    before = server.metric("prefix_cache_hits_total")
    answer = complete(server, [ids] * 4, max_tokens=8)
    assert server.metric("prefix_cache_hits_total") > before
    assert len({text_of(answer, i) for i in range(4)}) == 1


def test_k10_an_idle_server_with_cached_prefixes_uses_nothing(server: Server) -> None:
    ids = fresh_ids(64)
    hits(server, ids)
    server.wait_idle()
    assert server.metric("kv_cache_usage_perc") == 0
    assert hits(server, ids) == 48


def test_cache_on_and_off_give_the_same_text(server: Server, plain: Server) -> None:
    prompts = [f"{'The quick brown fox. ' * 12}Story {i}:" for i in range(4)]
    warm = [
        text_of(a) for _ in range(2) for a in together(*[partial(complete, server, p, max_tokens=12) for p in prompts])
    ]
    off = [text_of(complete(plain, p, max_tokens=12)) for p in prompts]
    assert warm == off * 2
    assert cached_tokens(complete(plain, prompts[0], max_tokens=1)) == 0
