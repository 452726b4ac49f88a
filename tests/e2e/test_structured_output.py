"""Constrained answers as a client sees them (G1 to G6): always valid, never in the way of others."""

from __future__ import annotations

import json
import re
import threading
from functools import partial

import jsonschema
import pytest

from tests.e2e.client import (
    Json,
    chat,
    choice_of,
    complete,
    expect_refusal,
    messages,
    post,
    stream_chat,
    text_of,
    together,
)
from tests.e2e.server import Server
from tests.waiting import wait_until

PERSON: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
AS_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
# A second of work for the compiler: the patterns of each object are compared in pairs.
SLOW: Json = {
    "type": "object",
    "properties": {
        f"p{part}": {"type": "object", "patternProperties": {f"^k{i}x[a-z]*$": {} for i in range(100)}}
        for part in range(20)
    },
}


def constrained(server: Server, seed: int, **fields: object) -> Json:
    return complete(server, "Q", max_tokens=200, temperature=1.0, seed=seed, **fields)


def test_g1_every_sampled_answer_obeys_its_schema(tiny: Server) -> None:
    """A random model at temperature 1: nothing but the grammar makes its text JSON."""
    answers = together(*(partial(constrained, tiny, seed, response_format=AS_SCHEMA) for seed in range(50)))
    for answer in answers:
        if choice_of(answer)["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text_of(answer)), PERSON)
        else:
            assert choice_of(answer)["finish_reason"] == "length"
    assert sum(choice_of(answer)["finish_reason"] == "stop" for answer in answers) > 25


def test_g1_the_built_in_model_fills_a_schema(server: Server) -> None:
    for fields in ({}, {"temperature": 1.0, "seed": 3}):
        answer = chat(server, "Describe Anna, 31 years old.", max_tokens=120, response_format=AS_SCHEMA, **fields)
        assert choice_of(answer)["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text_of(answer)), PERSON)


def test_g1_a_streamed_answer_equals_the_plain_one(tiny: Server) -> None:
    fields = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "response_format": AS_SCHEMA}
    stream = stream_chat(tiny, "Q", **fields)
    plain = chat(tiny, "Q", **fields)
    assert stream.done
    assert stream.text() == text_of(plain)
    assert stream.finish_reason() == choice_of(plain)["finish_reason"]


def test_g1_any_object_has_no_trailing_blanks(tiny: Server) -> None:
    for seed in range(5):
        fields = {"max_tokens": 300, "temperature": 1.0, "seed": seed, "response_format": {"type": "json_object"}}
        answer = chat(tiny, "Q", **fields)
        if choice_of(answer)["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(answer)), dict)
            assert text_of(answer) == text_of(answer).strip()


def test_g1_several_choices_obey_the_same_grammar(tiny: Server) -> None:
    answer = constrained(tiny, 1, n=4, structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"})
    texts = [text_of(answer, index) for index in range(4)]
    assert all(re.fullmatch("[a-f]{4}-[0-9]{2}", text) for text in texts)
    assert len(set(texts)) > 1


def test_g2_a_choice_is_one_of_them_and_then_the_answer_stops(server: Server) -> None:
    choices = ["positive", "negative", "neutral (neither)"]
    for text in ("I love it!", "It broke at once.", "It is a table."):
        answer = chat(server, text, max_tokens=20, structured_outputs={"choice": choices})
        assert text_of(answer) in choices
        assert choice_of(answer)["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"\d{3}-\d{4}"}, r"[0-9]{3}-[0-9]{4}"),
        ({"grammar": 'root ::= item ("," item){2}\nitem ::= "x" | [0-9]{1,2}'}, r"(x|\d\d?),(x|\d\d?),(x|\d\d?)"),
        ({"grammar": 'start: "SELECT " COLUMN " FROM t"\nCOLUMN: /[a-z]{1,5}/'}, r"SELECT [a-z]{1,5} FROM t"),
        ({"json": {"type": "boolean"}}, "true|false"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "sequence", "elements": [
                {"type": "const_string", "value": "<a>"}, {"type": "regex", "pattern": "[0-9]{2}"}]}}},
            "<a>[0-9]{2}",
        ),
    ],
    ids=["regex", "gbnf", "lark", "json", "structural_tag"],
)  # fmt: skip
def test_g2_every_kind_of_constraint_holds(tiny: Server, constraint: Json, pattern: str) -> None:
    for seed in range(3):
        text = text_of(constrained(tiny, seed, structured_outputs=constraint))
        assert re.fullmatch(pattern, text), text


def test_g2_a_complete_text_stops_whatever_else_is_asked(tiny: Server) -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "min_tokens": 30}):
        answer = constrained(tiny, 1, structured_outputs={"choice": ["ab"]}, **fields)
        assert (text_of(answer), choice_of(answer)["finish_reason"]) == ("ab", "stop")


def test_g2_max_tokens_cuts_to_a_prefix(tiny: Server) -> None:
    answer = complete(tiny, "Q", max_tokens=4, structured_outputs={"regex": "[0-9]{50}"})
    assert choice_of(answer)["finish_reason"] == "length"
    assert re.fullmatch("[0-9]{1,49}", text_of(answer))


def test_g3_two_constraints_are_refused(tiny: Server) -> None:
    body = {"prompt": "Q", "structured_outputs": {"regex": "a", "choice": ["a"]}}
    expect_refusal(post(tiny, "/v1/completions", body), 400, "structured_outputs")
    body = {"prompt": "Q", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    expect_refusal(post(tiny, "/v1/completions", body), 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("constraint", "word"),
    [
        ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "root ::= nowhere"}, "nowhere"),
        ({"structural_tag": {"format": {"type": "nonsense"}}}, "nonsense"),
    ],
    ids=["not", "uniqueItems", "ref", "regex", "grammar", "tag"],
)
def test_g4_what_cannot_be_followed_is_400_with_the_reason(
    tiny: Server, constraint: Json, word: str, stream: bool
) -> None:
    body = {"messages": messages("Q"), "structured_outputs": constraint, "stream": stream}
    error = expect_refusal(post(tiny, "/v1/chat/completions", body), 400)
    assert word in str(error["message"])
    assert "guidance" not in str(error["message"])
    assert choice_of(complete(tiny, "Q", max_tokens=2, ignore_eos=True))["finish_reason"] == "length"


def test_g5_a_slow_grammar_delays_nobody_and_shows_as_deferred(tiny: Server) -> None:
    slow = {"prompt": "Q", "max_tokens": 4, "structured_outputs": {"json": SLOW}}
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(post(tiny, "/v1/completions", slow).status_code))
    thread.start()
    deferred: list[float] = []
    answers = 0
    while thread.is_alive():
        assert text_of(complete(tiny, "Q", max_tokens=3, ignore_eos=True))
        answers += 1
        samples = tiny.samples("serve:num_requests_waiting_by_reason")
        deferred += [value for labels, value in samples if labels["reason"] == "deferred"]
    thread.join()
    # On a loaded machine the compiler may need more than its two seconds: then the request is refused.
    assert statuses in ([200], [400])
    assert answers >= 3
    assert max(deferred) == 1
    wait_until(lambda: tiny.metric("num_requests_waiting") == 0, 10, "nobody waits")


def test_g6_free_requests_beside_constrained_ones_keep_their_text(server: Server) -> None:
    prompt = "The three primary colours are"
    alone = text_of(complete(server, prompt, max_tokens=24, ignore_eos=True))
    calls = [partial(complete, server, prompt, max_tokens=24, ignore_eos=True) for _ in range(3)]
    calls += [
        partial(complete, server, prompt, max_tokens=24, structured_outputs={"regex": "( [a-z]+){1,12}"})
        for _ in range(3)
    ]
    answers = together(*calls)
    assert [text_of(answer) for answer in answers[:3]] == [alone] * 3
    constrained_texts = {text_of(answer) for answer in answers[3:]}
    assert len(constrained_texts) == 1
    assert re.fullmatch("( [a-z]+)+ ?", constrained_texts.pop())


def test_g6_async_and_plain_scheduling_give_the_same_constrained_text(server: Server, plain: Server) -> None:
    fields: Json = {"max_tokens": 60, "response_format": AS_SCHEMA}
    texts = [text_of(chat(one, "Describe Bob, 5 years old.", **fields)) for one in (server, plain)]
    assert texts[0] == texts[1]
