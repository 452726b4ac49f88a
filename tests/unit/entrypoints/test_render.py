"""The render endpoints and token ids in, token ids out: what would run is what runs."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.outputs import Logprob
from serve.wire.frontend import FinishReason
from tests.fakes import BOS_ID, hand_over
from tests.unit.entrypoints.app_client import App, Reply, answer, chat, make_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"


def post(path: str, body: object, script=None, **server: object) -> tuple[Reply, App]:
    async def work() -> tuple[Reply, App]:
        app = make_app(script, **server)
        return await app.post(path, body), app

    return asyncio.run(work())


def test_a_rendered_chat_shows_prompt_ids_and_sampling_and_runs_nothing() -> None:
    body = chat(temperature=0, stop="x", seed=3, response_format={"type": "json_object"}, cache_salt="s")
    reply, app = post(f"{CHAT}/render", body)
    shown = reply.json
    assert reply.status == 200
    assert app.llm.requests == []
    assert shown["prompt"] == "<user>hi<a>"
    assert shown["token_ids"] == list(b"<user>hi<a>")
    assert (shown["model"], shown["stream"], shown["cache_salt"], shown["priority"]) == ("m", False, "s", 0)
    sampling = shown["sampling_params"]
    assert (sampling["max_tokens"], sampling["stop"], sampling["seed"], sampling["temperature"]) == (4, ["x"], 3, 0.0)
    assert sampling["structured_outputs"]["json_object"] is True


def test_a_rendered_completion_has_one_entry_for_each_prompt() -> None:
    reply, _ = post(f"{COMPLETIONS}/render", {"prompt": ["a", "bc"], "max_tokens": 3})
    assert [entry["token_ids"] for entry in reply.json] == [[BOS_ID, 97], [BOS_ID, 98, 99]]
    assert [entry["prompt"] for entry in reply.json] == ["a", "bc"]


FIELDS = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": 9,
    "min_tokens": 1,
    "stop": ["q"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2, 97],
    "bad_words": ["w"],
    "skip_special_tokens": False,
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
    "vllm_xargs": {"k": 1},
}
CONSTRAINTS = [
    {"json": {"type": "object"}},
    {"regex": "a+"},
    {"choice": ["a", "b"]},
    {"grammar": 'root ::= "a"'},
    {"json_object": True},
]


@pytest.mark.parametrize("structured", [None, *CONSTRAINTS])
def test_a_rendered_request_runs_as_it_was_sent(structured: object) -> None:
    async def work() -> list:
        app = make_app()
        body = chat(**FIELDS, logprobs=True, top_logprobs=2, structured_outputs=structured)
        rendered = await app.post(f"{CHAT}/render", body)
        assert rendered.status == 200, rendered.body
        for path, sent in ((CHAT, body), (GENERATE, rendered.json)):
            reply = await app.post(path, sent)
            assert reply.status == 200, reply.body
        return app.llm.requests

    (direct_ids, direct, *_), (again_ids, again, *_) = asyncio.run(work())
    assert again_ids == direct_ids
    assert again == direct


def test_generate_answers_with_token_ids() -> None:
    logprobs = [{104: Logprob(-0.5, 1, "h", b"h")}, {105: Logprob(-0.25, 1, "i", b"i")}]
    script = lambda params: [hand_over("hi", finish=FinishReason.STOP, logprobs=logprobs)]  # noqa: E731
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "logprobs": 1}, "request_id": "mine"}
    reply, app = post(GENERATE, body, script)
    assert reply.json["request_id"] == "mine"
    (choice,) = reply.json["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, [104, 105], "stop")
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -0.25]
    assert reply.json["usage"]["total_tokens"] == 5
    assert app.llm.requests[0][0] == [1, 2, 3]


def test_generate_streams_token_ids() -> None:
    reply, _ = post(GENERATE, {"token_ids": [1], "stream": True, "sampling_params": {"n": 2}}, answer("ok"))
    assert reply.events[-1] == "[DONE]"
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in reply.chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    assert ids == {0: [111, 107], 1: [111, 107]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"prompt": "a"}}, "sampling_params.prompt"),
        ({"token_ids": [1], "sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"token_ids": [1], "sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
    ],
)
def test_generate_refuses_and_names_the_field(body: dict, param: str) -> None:
    reply, app = post(GENERATE, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert app.llm.requests == []


def test_prompt_text_comes_back_on_request() -> None:
    reply, _ = post(CHAT, chat(return_prompt_text=True))
    assert reply.json["prompt_text"] == "<user>hi<a>"
    reply, _ = post(CHAT, chat(return_prompt_text=True, stream=True))
    assert [chunk.get("prompt_text") for chunk in reply.chunks][:2] == ["<user>hi<a>", None]
    reply, _ = post(COMPLETIONS, {"prompt": ["a", "b"], "return_prompt_text": True})
    assert [choice["prompt_text"] for choice in reply.json["choices"]] == ["a", "b"]
    reply, _ = post(COMPLETIONS, {"prompt": "a"})
    assert "prompt_text" not in reply.json["choices"][0]


def test_chosen_ids_are_the_top_logprobs_of_a_chat() -> None:
    position = {
        104: Logprob(-0.5, 1, "h", b"h"),
        99: Logprob(-4.0, 2, "c", b"c"),
        98: Logprob(-3.0, 1, "b", b"b"),
    }
    script = lambda params: [hand_over("h", finish=FinishReason.STOP, logprobs=[position])]  # noqa: E731
    reply, app = post(CHAT, chat(logprobs=True, logprob_token_ids=[99, 98]), script)
    (entry,) = reply.json["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "h"
    assert [(c["token"], c["logprob"]) for c in entry["top_logprobs"]] == [("b", -3.0), ("c", -4.0)]
    assert app.llm.requests[0][1].logprob_token_ids == (99, 98)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "stop": ["a"]}, "stop"),
        ({"use_beam_search": True, "logprobs": 0}, "logprobs"),
        ({"use_beam_search": True, "logit_bias": {"1": 1}}, "logit_bias"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "n": 50}, "n"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"prompt_embeds": "aaaa"}, "prompt_embeds"),
        ({"prompt_embeds": "aaaa", "echo": True}, "echo"),
    ],
)
def test_what_does_not_go_together_is_refused(extra: dict, param: str) -> None:
    reply, app = post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, **extra})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert app.llm.requests == []


def test_a_completion_needs_a_prompt() -> None:
    reply, _ = post(COMPLETIONS, {"max_tokens": 2})
    assert (reply.status, reply.error["param"]) == (400, "prompt")
