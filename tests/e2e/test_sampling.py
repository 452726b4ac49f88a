"""Sampling as seen in the answers (L1 to L7)."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.e2e.client import (
    Json,
    chat,
    choice_of,
    complete,
    text_of,
    together,
    tokenize,
)
from tests.e2e.server import Server

PROMPT = "The three primary colours are"
REPETITIVE = "na na na na na na na na na"


def chat_logprobs(answer: Json) -> list[Json]:
    """Give the logprob entries of the first choice of a chat answer."""
    return list(choice_of(answer)["logprobs"]["content"])  # type: ignore[index]


def test_l1_greedy_token_is_the_best_of_its_logprobs(server: Server) -> None:
    answer = complete(server, PROMPT, max_tokens=8, logprobs=5)
    table = choice_of(answer)["logprobs"]
    assert isinstance(table, dict)
    assert "".join(table["tokens"]) == text_of(answer)
    for token, value, top in zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True):
        assert len(top) <= 6
        assert top[token] == value == max(top.values())


def test_l1_zero_logprobs_give_the_sampled_token_only(server: Server) -> None:
    answer = complete(server, PROMPT, max_tokens=4, logprobs=0)
    table = choice_of(answer)["logprobs"]
    assert isinstance(table, dict)
    assert [set(top) for top in table["top_logprobs"]] == [{t} for t in table["tokens"]]


def test_l1_chat_entries_hold_exactly_the_asked_number_and_spell_the_text(server: Server) -> None:
    answer = chat(server, "Name a colour.", max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=3)
    entries = chat_logprobs(answer)
    assert len(entries) == 6
    assert all(len(e["top_logprobs"]) == 3 for e in entries)  # type: ignore[arg-type]
    spelled = b"".join(bytes(e["bytes"]) for e in entries)  # type: ignore[call-overload]
    assert spelled.decode() == text_of(answer)


def test_l1_logprobs_are_of_a_distribution(server: Server) -> None:
    """20 candidates of one position: each at most 1, in sum at most 1, and ordered."""
    answer = chat(server, "Name a colour.", max_tokens=1, logprobs=True, top_logprobs=20)
    values = [t["logprob"] for t in chat_logprobs(answer)[0]["top_logprobs"]]  # type: ignore[attr-defined]
    assert values == sorted(values, reverse=True)
    assert 0.3 < sum(math.exp(v) for v in values) <= 1.0001


def best_logprob(server: Server, temperature: float) -> float:
    """Give the value of the likeliest of two allowed tokens, one of which is drawn."""
    allowed = [*tokenize(server, " red"), *tokenize(server, " blue")]
    assert len(allowed) == 2
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 1, "logprobs": 1}
    answer = complete(server, "My favourite colour is", allowed_token_ids=allowed, **fields)
    return max(choice_of(answer)["logprobs"]["top_logprobs"][0].values())  # type: ignore[index]


def test_l2_raw_logprobs_do_not_depend_on_the_temperature(server: Server) -> None:
    assert best_logprob(server, 0.5) == best_logprob(server, 1.0)


def test_l2_processed_logprobs_do(plain: Server) -> None:
    """Two tokens are left, so their difference in logits d gives log sigmoid(d / temperature) for the better one."""
    half, one = best_logprob(plain, 0.5), best_logprob(plain, 1.0)
    difference = math.log(math.exp(one) / -math.expm1(one))
    assert half == pytest.approx(-math.log1p(math.exp(-2 * difference)), abs=1e-3)
    assert half != one


def test_l3_one_candidate_is_greedy(server: Server) -> None:
    greedy = complete(server, PROMPT, max_tokens=16)
    drawn = complete(server, PROMPT, max_tokens=16, temperature=1.0, top_k=1)
    assert text_of(drawn) == text_of(greedy)


def test_l4_repetition_penalty_counts_the_prompt_and_presence_penalty_does_not(server: Server) -> None:
    assert text_of(complete(server, REPETITIVE, max_tokens=1)) == " na"
    assert text_of(complete(server, REPETITIVE, max_tokens=1, presence_penalty=2)) == " na"
    assert text_of(complete(server, REPETITIVE, max_tokens=1, frequency_penalty=2)) == " na"
    assert text_of(complete(server, REPETITIVE, max_tokens=1, repetition_penalty=2)) != " na"


def test_l4_output_penalties_end_a_repetition(server: Server) -> None:
    free = text_of(complete(server, REPETITIVE, max_tokens=8))
    assert free == " na" * 8
    assert text_of(complete(server, REPETITIVE, max_tokens=8, frequency_penalty=2)) != free


def test_l5_a_banned_pair_of_words_never_appears_but_its_words_may(server: Server) -> None:
    free = text_of(complete(server, PROMPT, max_tokens=12))
    words = free.split()
    pair = f"{words[0]} {words[1]}"
    held = text_of(complete(server, PROMPT, max_tokens=12, bad_words=[pair]))
    assert pair in free
    assert pair not in held
    # The first word alone is still allowed, so the text is the same up to it.
    assert held.split()[0] == words[0]


def test_l6_only_allowed_tokens_come_out(server: Server) -> None:
    allowed = [*tokenize(server, " red"), *tokenize(server, " blue")]
    fields = {"temperature": 2.0, "seed": 1, "max_tokens": 40, "return_token_ids": True}
    answer = complete(server, "Colours:", allowed_token_ids=allowed, **fields)
    assert set(choice_of(answer)["token_ids"]) == set(allowed)  # type: ignore[call-overload]


def test_l7_random_neighbours_leave_greedy_text_unchanged(server: Server) -> None:
    greedy = partial(complete, server, PROMPT, max_tokens=16)
    noisy = [partial(complete, server, PROMPT, max_tokens=16, temperature=1.3, seed=i) for i in range(6)]
    alone = text_of(greedy())
    answers = together(*noisy[:3], greedy, *noisy[3:])
    assert text_of(answers[3]) == alone
    assert len({text_of(a) for a in answers}) > 2


def test_seeds_repeat_and_differ(server: Server) -> None:
    ask = partial(complete, server, PROMPT, max_tokens=16, temperature=1.0)
    assert text_of(ask(seed=-1)) == text_of(ask(seed=-1))
    assert len({text_of(ask(seed=s)) for s in (-1, 0, 2**63 - 1)}) == 3


def test_prompt_logprobs_list_the_prompt(server: Server) -> None:
    ids = tokenize(server, PROMPT)
    answer = complete(server, PROMPT, max_tokens=1, prompt_logprobs=2)
    table = choice_of(answer)["prompt_logprobs"]
    assert isinstance(table, list)
    assert table[0] is None
    for token, entry in zip(ids[1:], table[1:], strict=True):
        ranks = {int(i): e["rank"] for i, e in entry.items()}
        assert token in ranks
        assert len(ranks) == (2 if ranks[token] <= 2 else 3)
        assert {1, 2} <= set(ranks.values())
