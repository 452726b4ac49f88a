"""POST /v1/completions: prompt forms, choice order, echo, logprobs, chunks."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.outputs import Logprob, RequestOutput
from serve.wire.frontend import FinishReason
from tests.fakes import BOS_ID, hand_over
from tests.unit.entrypoints.app_client import Reply, answer, make_app

COMPLETIONS = "/v1/completions"
LENGTH = FinishReason.LENGTH


def post(body: dict, script=None, **server: object) -> tuple[Reply, list]:
    async def work() -> tuple[Reply, list]:
        app = make_app(script, disable_fastapi_docs=True, **server)
        return await app.post(COMPLETIONS, body), app.llm.requests

    return asyncio.run(work())


def logprob(token: bytes, value: float = -1.0, rank: int = 1) -> Logprob:
    return Logprob(value, rank, token.decode(errors="replace"), token)


def test_plain_answer_has_every_field_a_client_reads() -> None:
    reply, _ = post({"prompt": [1, 2, 3]}, answer("ok"))
    body = reply.json
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["choices"] == [
        {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_has_text_deltas_and_no_role() -> None:
    reply, _ = post({"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}, answer("ok"))
    *chunks, last = reply.chunks
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "o", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "k", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    ]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert reply.events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS_ID, 97, 98]]),
        (["a", "b"], [[BOS_ID, 97], [BOS_ID, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_the_four_prompt_forms(prompt: object, expected: list) -> None:
    _, requests = post({"prompt": prompt})
    assert [token_ids for token_ids, _, _, _ in requests] == expected


def test_choice_index_is_prompt_times_n_plus_sample() -> None:
    reply, requests = post({"prompt": [[1], [2], [3]], "n": 2}, answer("ok"))
    assert [c["index"] for c in reply.json["choices"]] == [0, 1, 2, 3, 4, 5]
    assert reply.json["usage"]["prompt_tokens"] == 3
    assert reply.json["usage"]["completion_tokens"] == 12
    assert [request_id.rsplit("-", 1)[1] for _, _, request_id, _ in requests] == ["0", "1", "2"]


def test_streams_of_several_prompts_each_finish_once() -> None:
    reply, _ = post({"prompt": [[1], [2]], "n": 2, "stream": True}, answer("xyz"))
    choices = [c["choices"][0] for c in reply.chunks]
    for index in range(4):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["text"] for c in mine) == "xyz"
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]


def test_error_of_one_prompt_ends_the_stream_and_all_prompts() -> None:
    async def work() -> None:
        calls = iter([[hand_over("a"), KeyError("x")], [hand_over("b"), asyncio.Event()]])
        app = make_app(lambda params: next(calls))
        reply = await app.post(COMPLETIONS, {"prompt": [[1], [2]], "stream": True})
        assert reply.chunks[-1]["error"]["type"] == "InternalServerError"
        assert sorted(app.llm.closed) == sorted(request_id for _, _, request_id, _ in app.llm.requests)

    asyncio.run(work())


def test_refusal_of_the_second_prompt_leaves_nothing_of_the_first() -> None:
    async def work() -> None:
        app = make_app()
        reply = await app.post(COMPLETIONS, {"prompt": [[1] * 10, [1] * 200]})
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert app.llm.requests == []

    asyncio.run(work())


def test_output_limit_defaults_to_16_and_is_cut_by_the_context() -> None:
    assert post({"prompt": [1]})[1][0][1].max_tokens == 16
    assert post({"prompt": [1], "max_tokens": None})[1][0][1].max_tokens == 16
    assert post({"prompt": [1] * 127})[1][0][1].max_tokens == 1


def test_prompt_and_explicit_limit_beyond_the_context_are_400() -> None:
    reply, _ = post({"prompt": [1] * 100, "max_tokens": 50})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert all(number in reply.error["message"] for number in ("100", "50", "128"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a", [1, 2]]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
    ],
)
def test_wrong_fields_are_400_and_named(fields: dict, param: str) -> None:
    reply, requests = post({"prompt": "a", **fields})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert not requests


def test_echo_puts_the_prompt_first_once_per_choice() -> None:
    reply, _ = post({"prompt": "ab", "echo": True}, answer("ok"))
    assert reply.json["choices"][0]["text"] == "abok"
    streamed, _ = post({"prompt": "ab", "echo": True, "stream": True}, answer("ok"))
    assert [c["choices"][0]["text"] for c in streamed.chunks] == ["abo", "k"]
    ids, _ = post({"prompt": [97, 98], "echo": True}, answer("ok"))
    assert ids.json["choices"][0]["text"] == "abok"


def test_echo_with_no_output_scores_the_prompt_only() -> None:
    def script(params):
        assert (params.max_tokens, params.prompt_logprobs) == (1, 1)
        output = hand_over("z", [122], finish=LENGTH, logprobs=[{122: logprob(b"z")}])
        output.prompt_logprobs = [None, {98: logprob(b"b", -0.5), 99: logprob(b"c", -0.25)}]
        return [output]

    reply, _ = post({"prompt": [97, 98], "echo": True, "max_tokens": 0, "logprobs": 1}, script)
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -0.25}],
        "text_offset": [0, 1],
    }
    assert reply.json["usage"]["completion_tokens"] == 0


def test_logprobs_line_up_with_the_text_also_when_a_character_is_split() -> None:
    euro = "\u20ac".encode()
    positions = [{1: logprob(b"x")}, {2: logprob(euro[:1])}, {3: logprob(euro[1:])}, {4: logprob(b"y", -2, 2)}]

    def script(params):
        return [hand_over("x\u20acy", [1, 2, 3, 4], finish=LENGTH, logprobs=positions)]

    reply, _ = post({"prompt": "a", "logprobs": 1}, script)
    block = reply.json["choices"][0]["logprobs"]
    assert block["tokens"] == ["x", "", "\u20ac", "y"]
    assert block["text_offset"] == [0, 1, 1, 2]
    assert block["token_logprobs"] == [-1.0, -1.0, -1.0, -2.0]


def test_logprobs_line_up_with_the_text_also_when_bytes_can_never_become_a_character() -> None:
    positions = [{1: logprob(b"\xed")}, {2: logprob(b"\xa0")}]

    def script(params):
        return [hand_over("\ufffd\ufffd", [1, 2], finish=LENGTH, logprobs=positions)]

    reply, _ = post({"prompt": "a", "logprobs": 1}, script)
    block = reply.json["choices"][0]["logprobs"]
    assert block["tokens"] == ["", "\ufffd\ufffd"]


def test_streamed_offsets_go_on_from_chunk_to_chunk_and_from_the_echoed_prompt() -> None:
    def script(params):
        first = hand_over("cd", [99, 100], logprobs=[{99: logprob(b"c")}, {100: logprob(b"d")}])
        first.prompt_logprobs = [None, {98: logprob(b"b")}]
        return [first, hand_over("e", [101], finish=LENGTH, logprobs=[{101: logprob(b"e")}])]

    reply, _ = post({"prompt": [97, 98], "logprobs": 0, "echo": True, "stream": True}, script)
    blocks = [c["choices"][0]["logprobs"] for c in reply.chunks]
    assert [b["tokens"] for b in blocks] == [["a", "b", "c", "d"], ["e"]]
    assert [b["text_offset"] for b in blocks] == [[0, 1, 2, 3], [4]]


def test_prompt_logprobs_sit_in_each_choice() -> None:
    def script(params):
        output = hand_over("z", finish=LENGTH)
        output.prompt_logprobs = [None, {98: logprob(b"b", float("-inf"), 9)}]
        return [output]

    reply, _ = post({"prompt": [97, 98], "prompt_logprobs": 0}, script)
    expected = [None, {"98": {"logprob": -9999.0, "rank": 9, "decoded_token": "b"}}]
    assert reply.json["choices"][0]["prompt_logprobs"] == expected


def test_token_ids_are_returned_on_request_and_the_prompts_once() -> None:
    reply, _ = post({"prompt": [97, 98], "return_token_ids": True}, answer("ok"))
    choice = reply.json["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [111, 107])
    streamed, _ = post({"prompt": [97, 98], "return_token_ids": True, "stream": True}, answer("ok"))
    choices = [c["choices"][0] for c in streamed.chunks]
    assert [c.get("prompt_token_ids") for c in choices] == [[97, 98], None]
    assert [c["token_ids"] for c in choices] == [[111], [107]]


def test_truncation_keeps_the_last_ids_or_the_first() -> None:
    assert post({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2})[1][0][0] == [3, 4]
    body = {"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert post(body)[1][0][0] == [1, 2]


def test_cached_tokens_are_summed_over_prompts() -> None:
    def script(params):
        return [RequestOutput("id", [], hand_over("a", finish=LENGTH).outputs, finished=True, num_cached_tokens=16)]

    reply, _ = post({"prompt": [[1], [2]]}, script)
    assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    hidden, _ = post({"prompt": [1]}, script, enable_prompt_tokens_details=False)
    assert "prompt_tokens_details" not in hidden.json["usage"]
