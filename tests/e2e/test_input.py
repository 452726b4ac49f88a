"""Sampling values, ids and limits at the last gate (I1 to I12)."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from tests.e2e.client import (
    chat,
    choice_of,
    complete,
    expect_refusal,
    messages,
    open_stream,
    post,
    stream_chat,
    text_of,
    together,
    tokenize,
    usage_of,
)
from tests.e2e.server import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def test_i1_tiny_temperature_acts_as_a_hundredth_and_three_is_refused(server: Server) -> None:
    tiny = complete(server, "The sky is", temperature=0.001, seed=3, max_tokens=12)
    floor = complete(server, "The sky is", temperature=0.01, seed=3, max_tokens=12)
    assert text_of(tiny) == text_of(floor)
    expect_refusal(post(server, COMPLETIONS, {"prompt": "x", "temperature": 3}), 400, "temperature")


def test_i2_greedy_choices_are_equal(server: Server) -> None:
    answer = chat(server, "Name a fruit.", n=2, max_tokens=8)
    assert text_of(answer, 0) == text_of(answer, 1) == text_of(chat(server, "Name a fruit.", max_tokens=8))


@pytest.mark.parametrize("stream", [False, True])
def test_i3_more_logprobs_than_allowed_are_refused_before_a_stream_starts(server: Server, stream: bool) -> None:
    response = post(server, COMPLETIONS, {"prompt": "x", "logprobs": 21, "stream": stream})
    assert "20" in str(expect_refusal(response, 400, "logprobs")["message"])
    body = {"messages": messages("x"), "logprobs": True, "top_logprobs": 21, "stream": stream}
    expect_refusal(post(server, CHAT, body), 400, "top_logprobs")


def test_i6_ignore_eos_runs_to_the_limit(server: Server) -> None:
    natural = chat(server, "Say OK.", max_tokens=60)
    forced = chat(server, "Say OK.", max_tokens=60, ignore_eos=True)
    assert choice_of(natural)["finish_reason"] == "stop"
    assert usage_of(forced)["completion_tokens"] == 60
    assert choice_of(forced)["finish_reason"] == "length"


def test_i7_min_tokens_holds_off_end_tokens_and_stop_strings(server: Server) -> None:
    natural = usage_of(chat(server, "Say OK.", max_tokens=60))["completion_tokens"]
    assert natural < 20
    forced = chat(server, "Say OK.", max_tokens=60, min_tokens=20)
    assert usage_of(forced)["completion_tokens"] >= 20
    counting = complete(server, "1, 2, 3, 4,", max_tokens=40, stop=",")
    assert usage_of(counting)["completion_tokens"] < 5
    delayed = complete(server, "1, 2, 3, 4,", max_tokens=40, stop=",", min_tokens=20)
    assert usage_of(delayed)["completion_tokens"] >= 20
    assert choice_of(delayed)["stop_reason"] == ","


def test_i8_two_requests_with_one_id_get_their_own_answers(server: Server) -> None:
    header = {"X-Request-Id": f"same-{uuid.uuid4().hex}"}

    def ask(prompt: str) -> dict[str, object]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        return dict(post(server, COMPLETIONS, body, **header).json())

    first, second = together(partial(ask, "One, two, three,"), partial(ask, "The capital of Italy is"))
    assert first["id"] == second["id"] == f"cmpl-{header['X-Request-Id']}"
    assert text_of(first) == text_of(complete(server, "One, two, three,", max_tokens=12))
    assert text_of(second) == text_of(complete(server, "The capital of Italy is", max_tokens=12))


def test_i9_three_seeded_choices_equal_three_seeded_requests(server: Server) -> None:
    fields = {"temperature": 1.0, "max_tokens": 12}
    several = complete(server, "My favourite thing is", n=3, seed=7, **fields)
    singles = [text_of(complete(server, "My favourite thing is", seed=seed, **fields)) for seed in (7, 8, 9)]
    assert [text_of(several, i) for i in range(3)] == singles
    assert len(set(singles)) > 1


def test_i10_a_seeded_request_does_not_depend_on_its_neighbours(server: Server) -> None:
    ask = partial(complete, server, "A short poem:", temperature=0.9, seed=1234, max_tokens=16)
    alone = text_of(ask())
    others = [partial(complete, server, f"Story number {i}", temperature=1.0, seed=i, max_tokens=16) for i in range(50)]
    answers = together(*others[:25], ask, *others[25:])
    assert text_of(answers[25]) == alone


def test_i11_logit_bias_forces_a_token_clamps_and_checks_ids(server: Server) -> None:
    (token,) = tokenize(server, " blue")
    forced = complete(server, "The grass is", max_tokens=3, logit_bias={str(token): 100})
    huge = complete(server, "The grass is", max_tokens=3, logit_bias={str(token): 1000})
    assert text_of(forced) == text_of(huge) == " blue blue blue"
    error = expect_refusal(post(server, COMPLETIONS, {"prompt": "x", "logit_bias": {"49152": 1}}), 400)
    assert str(error["param"]).startswith("logit_bias")


def test_i12_unknown_fields_are_accepted(server: Server) -> None:
    plain = text_of(chat(server, "Name a tree.", max_tokens=6))
    assert text_of(chat(server, "Name a tree.", max_tokens=6, no_such_field={"deep": [1]})) == plain


@pytest.mark.parametrize("name", ["guided_json", "guided_choice", "logits_processors"])
def test_i12_renamed_fields_are_refused(server: Server, name: str) -> None:
    expect_refusal(post(server, CHAT, {"messages": messages("x"), name: ["a"]}), 400, name)


def test_request_id_of_the_body_names_the_answer(server: Server) -> None:
    own = uuid.uuid4().hex
    assert chat(server, "Hi", max_tokens=1, request_id=own)["id"] == f"chatcmpl-{own}"
    assert stream_chat(server, "Hi", max_tokens=1, request_id=own).chunks[0]["id"] == f"chatcmpl-{own}"


def test_unseeded_requests_differ(server: Server) -> None:
    ask = partial(complete, server, "Random words:", temperature=1.5, max_tokens=12)
    assert len({text_of(ask()) for _ in range(3)}) > 1


def test_a_refused_stream_is_plain_json(server: Server) -> None:
    with open_stream(server, CHAT, {"messages": [], "max_tokens": 1}) as response:
        response.read()
        expect_refusal(response, 400, "messages")
