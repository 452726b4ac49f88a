"""POST /v1/chat/completions: shapes and chunk order, by hand from the API's rules."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.outputs import Logprob
from serve.wire.frontend import FinishReason
from tests.fakes import EOS_ID, hand_over
from tests.unit.entrypoints.app_client import Reply, answer, chat, make_app

CHAT = "/v1/chat/completions"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}  # "<user>hi<a>" is 11 bytes


def post(body: dict, script=None, **server: object) -> tuple[Reply, list]:
    async def work() -> tuple[Reply, list]:
        app = make_app(script, disable_fastapi_docs=True, **server)
        return await app.post(CHAT, body), app.llm.requests

    return asyncio.run(work())


def logprob(token: str, value: float, rank: int) -> Logprob:
    return Logprob(value, rank, token, token.encode())


def test_plain_answer_has_every_field_a_client_reads() -> None:
    reply, _ = post(chat(), answer("ok", STOP))
    body = reply.json
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        **USAGE,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_stream_begins_with_the_role_and_ends_with_finish_and_done() -> None:
    reply, _ = post(chat(stream=True), answer("ok", STOP))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.events[-1] == "[DONE]"
    chunks = reply.chunks
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "o"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "k"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert not any("usage" in c for c in chunks)


def test_usage_chunk_comes_last_with_no_choice_and_sums_all_choices() -> None:
    reply, _ = post(chat(stream=True, n=2, stream_options={"include_usage": True}), answer("ok"))
    *rest, last = reply.chunks
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 4,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert not any("usage" in c for c in rest)
    assert all(c["choices"] for c in rest)


def test_continuous_usage_counts_each_choice_so_far_and_needs_include_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply, _ = post(chat(stream=True, stream_options=options), answer("ok"))
    assert [c["usage"]["completion_tokens"] for c in reply.chunks] == [0, 1, 2, 2]
    reply, _ = post(chat(stream=True, stream_options={"continuous_usage_stats": True}), answer("ok"))
    assert not any("usage" in c for c in reply.chunks)


def test_every_choice_of_a_stream_has_one_role_and_one_finish_chunk() -> None:
    reply, _ = post(chat(stream=True, n=3), answer("abc"))
    choices = [c["choices"][0] for c in reply.chunks]
    for index in range(3):
        mine = [c for c in choices if c["index"] == index]
        assert [c["delta"].get("role") for c in mine].count("assistant") == 1
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine].count("length") == 1
        assert mine[-1]["finish_reason"] == "length"
        assert "".join(c["delta"]["content"] for c in mine) == "abc"


def test_hand_over_without_text_sends_no_chunk_unless_ids_were_asked_for() -> None:
    def script(params):
        return [hand_over("a", [97]), hand_over("", [98]), hand_over("bc", [99], finish=LENGTH)]

    reply, _ = post(chat(stream=True), script)
    assert [c["choices"][0]["delta"]["content"] for c in reply.chunks] == ["", "a", "bc"]
    reply, _ = post(chat(stream=True, return_token_ids=True), script)
    assert bytes(reply.chunks[0]["prompt_token_ids"]) == b"<user>hi<a>"
    assert [c["choices"][0].get("token_ids") for c in reply.chunks] == [None, [97], [98], [99]]
    assert not any("prompt_token_ids" in c for c in reply.chunks[1:])


def test_token_ids_are_returned_on_request() -> None:
    reply, _ = post(chat(return_token_ids=True), answer("ok"))
    assert reply.json["choices"][0]["token_ids"] == [111, 107]
    assert bytes(reply.json["prompt_token_ids"]) == b"<user>hi<a>"


def test_logprobs_have_an_entry_per_token_and_exactly_k_candidates() -> None:
    best, sampled, second = logprob("x", -0.5, 1), logprob("a", -3.0, 7), logprob("y", -1.5, 2)
    positions = [{97: sampled, 120: best, 121: second}, {EOS_ID: logprob("<eos>", float("-inf"), 1)}]

    def script(params):
        assert params.logprobs == 2
        return [hand_over("a", [97, EOS_ID], finish=STOP, logprobs=positions)]

    reply, _ = post(chat(logprobs=True, top_logprobs=2), script)
    content = reply.json["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "a",
            "logprob": -3.0,
            "bytes": [97],
            "top_logprobs": [
                {"token": "x", "logprob": -0.5, "bytes": [120]},
                {"token": "y", "logprob": -1.5, "bytes": [121]},
            ],
        },
        {
            "token": "<eos>",
            "logprob": -9999.0,
            "bytes": list(b"<eos>"),
            "top_logprobs": [{"token": "<eos>", "logprob": -9999.0, "bytes": list(b"<eos>")}],
        },
    ]


def test_logprobs_without_candidates_and_tokens_as_ids() -> None:
    def script(params):
        assert params.logprobs == 0
        return [hand_over("a", [97], finish=LENGTH, logprobs=[{97: logprob("a", -1.0, 3)}])]

    reply, _ = post(chat(logprobs=True, return_tokens_as_token_ids=True), script)
    assert reply.json["choices"][0]["logprobs"]["content"] == [
        {"token": "token_id:97", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    ]


def test_streamed_logprobs_ride_on_the_chunk_that_releases_their_token() -> None:
    def script(params):
        return [
            hand_over("a", [97], logprobs=[{97: logprob("a", -1.0, 1)}]),
            hand_over("bc", [98, 99], finish=LENGTH, logprobs=[{98: logprob("b", -2, 1)}, {99: logprob("c", -3, 1)}]),
        ]

    reply, _ = post(chat(stream=True, logprobs=True), script)
    blocks = [c["choices"][0]["logprobs"] for c in reply.chunks]
    assert [None if b is None else [e["token"] for e in b["content"]] for b in blocks] == [None, ["a"], ["b", "c"]]


def test_prompt_logprobs_are_a_list_over_the_prompt() -> None:
    output = hand_over("a", finish=LENGTH)
    output.prompt_logprobs = [None, {98: logprob("b", -0.25, 1)}]
    reply, requests = post(chat(prompt_logprobs=1), lambda params: [output])
    assert requests[0][1].prompt_logprobs == 1
    assert reply.json["prompt_logprobs"] == [None, {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]


def test_output_limit_new_name_wins_and_none_means_the_rest_of_the_context() -> None:
    assert post(chat(max_tokens=9, max_completion_tokens=2))[1][0][1].max_tokens == 2
    assert post(chat(max_tokens=None))[1][0][1].max_tokens == 128 - 11
    assert post(chat(max_tokens="4"))[1][0][1].max_tokens == 4


def test_model_defaults_fill_what_the_request_leaves_out() -> None:
    async def work() -> list:
        app = make_app()
        app.llm.default_sampling = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7}
        await app.post(CHAT, chat(max_tokens=None))
        await app.post(CHAT, chat(temperature=0.1, top_k=None))
        return [params for _, params, _, _ in app.llm.requests]

    filled, given = asyncio.run(work())
    assert (filled.temperature, filled.top_k, filled.top_p, filled.max_tokens) == (0.6, 20, 1.0, 7)
    assert (given.temperature, given.top_k, given.max_tokens) == (0.1, 20, 4)


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": -1,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    lists = {"stop": "end", "stop_token_ids": [5], "bad_words": ["no"], "allowed_token_ids": [1, 2]}
    extra = {"logit_bias": {"7": 5}, "vllm_xargs": {"k": [1, "x"]}, "cache_salt": "s"}
    _, requests = post(chat(**fields, **lists, **extra))
    _, params, request_id, options = requests[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("end",), (5,), ("no",))
    assert (params.allowed_token_ids, params.logit_bias, params.extra_args) == ((1, 2), {7: 5.0}, {"k": [1, "x"]})
    assert (options.cache_salt, options.priority) == ("s", 0)
    assert request_id.startswith("chatcmpl-")


def test_null_means_the_default_everywhere() -> None:
    names = "temperature top_p top_k min_p n stop stream stream_options logprobs top_logprobs tools seed"
    more = "user logit_bias presence_penalty frequency_penalty max_completion_tokens stop_token_ids echo cache_salt"
    reply, requests = post(chat(**dict.fromkeys((*names.split(), *more.split(), "response_format"))))
    assert reply.status == 200
    assert (requests[0][1].n, requests[0][1].temperature) == (1, 1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 129}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000000}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logit_bias": {"hello": 5}}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"best_of": 2}, "best_of"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"vllm_xargs": {"a": {"b": 1}}}, None),
    ],
)
def test_wrong_fields_are_400_and_named(fields: dict, param: str | None) -> None:
    reply, requests = post(chat(**fields))
    assert reply.status == 400, reply.body
    assert not requests
    if param is not None:
        assert reply.error["param"] == param


def test_fields_nobody_knows_and_harmless_values_are_accepted() -> None:
    ignored = {"metadata": {"a": "b"}, "store": False, "user": "u", "some_future_field": {"x": [1]}}
    harmless = {"use_beam_search": False, "best_of": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
    reply, _ = post(chat(**ignored, **harmless))
    assert reply.status == 200


def test_echo_puts_the_last_message_before_the_answer_when_the_role_is_the_same() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Say "}]
    fields = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    reply, requests = post({**chat(), **fields}, answer("ok"))
    assert bytes(requests[0][0]).endswith(b"<assistant>Say ")
    assert reply.json["choices"][0]["message"] == {"role": "assistant", "content": "Say ok", "refusal": None}
    streamed, _ = post({**chat(stream=True), **fields}, answer("ok"))
    assert "".join(c["choices"][0]["delta"]["content"] for c in streamed.chunks) == "Say ok"
    assert post(chat(echo=True))[0].json["choices"][0]["message"]["content"] == "ok"


def test_abort_by_the_operator_is_a_finish_reason() -> None:
    reply, _ = post(chat(), answer("ok", FinishReason.ABORT))
    assert reply.json["choices"][0]["finish_reason"] == "abort"
