"""Embeddings, pooling, classes, scores and rankings over HTTP, with an engine client that counts tokens."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from serve.checkpoint import PoolerConfig
from serve.entrypoints.openai.vectors import to_bytes
from serve.pooling_params import PoolingParams
from tests.fakes import BOS_ID, EOS_ID
from tests.unit.entrypoints.app_client import App, chat, make_app

CLASSIFIER = PoolerConfig(task="classify", labels=("no", "yes"))
SCORER = PoolerConfig(task="classify", labels=("fit",))
PATHS = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")


def pooling_app(pooler: PoolerConfig | None = None, **settings: object) -> App:
    app = make_app(**settings)  # type: ignore[arg-type]
    app.llm.pooling = pooler or PoolerConfig()
    return app


async def test_each_form_of_input_becomes_prompts_in_order() -> None:
    cases: list[tuple[object, list[list[int]]]] = [
        ("ab", [[BOS_ID, 97, 98, EOS_ID]]),
        (["a", "b"], [[BOS_ID, 97, EOS_ID], [BOS_ID, 98, EOS_ID]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ]
    for value, prompts in cases:
        app = pooling_app()
        reply = await app.post("/v1/embeddings", {"input": value, "model": "m"})
        assert reply.status == 200
        assert [request[0] for request in app.llm.pooling_requests] == prompts
        body = reply.json
        assert (body["object"], body["model"]) == ("list", "m")
        assert body["id"].startswith("embd-")
        assert [item["index"] for item in body["data"]] == list(range(len(prompts)))
        assert [item["embedding"] for item in body["data"]] == [[len(p), p[-1]] for p in prompts]
        assert {item["object"] for item in body["data"]} == {"embedding"}
        total = sum(map(len, prompts))
        assert body["usage"] == {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}


async def test_options_reach_the_engine() -> None:
    app = pooling_app()
    fields = {"input": "a", "priority": 4, "cache_salt": "s", "use_activation": False, "dimensions": 1}
    reply = await app.post("/v1/embeddings", {**fields, "request_id": "mine", "add_special_tokens": False})
    assert reply.json["id"] == "embd-mine"
    ((token_ids, params, request_id, options),) = app.llm.pooling_requests
    assert (token_ids, request_id) == ([97], "embd-mine-0")
    assert params == PoolingParams("embed", 1, False)
    assert (options.priority, options.cache_salt) == (4, "s")


async def test_conversation_is_rendered_by_the_template() -> None:
    app = pooling_app()
    reply = await app.post("/v1/embeddings", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply.status == 200
    assert bytes(app.llm.pooling_requests[0][0]) == b"<user>hi"


async def test_model_without_a_template_says_so() -> None:
    reply = await pooling_app(template=None).post("/v1/embeddings", {"messages": [{"role": "user", "content": "hi"}]})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "no chat template, so it cannot take messages; send input" in reply.error["message"]


@pytest.mark.parametrize(
    ("keep", "side", "text"), [(4, None, b"he"), (4, "left", b"lo"), (-1, None, b"hello"), (100, None, b"hello")]
)
async def test_cut_text_keeps_the_special_tokens_around_it(keep: int, side: str | None, text: bytes) -> None:
    app = pooling_app()
    await app.post("/v1/embeddings", {"input": "hello", "truncate_prompt_tokens": keep, "truncation_side": side})
    assert app.llm.pooling_requests[0][0] == [BOS_ID, *text, EOS_ID]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "hi"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [[1], []]}, "input.1"),
        ({"input": [[1], [True]]}, "input.1"),
        ({"input": [1, -1]}, "input"),
        ({"input": [2**40]}, "input"),
        ({"input": "x" * 200}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "normalize": True}, "normalize"),
        ({"input": "a", "dimensions": "four"}, "dimensions"),
        ({"input": "a", "task": "classify"}, "task"),
    ],
)
async def test_request_that_cannot_be_answered_is_400_with_the_field(fields: dict[str, object], param: str) -> None:
    reply = await pooling_app().post("/v1/embeddings", fields)
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_too_many_inputs_are_refused_with_the_flag() -> None:
    reply = await pooling_app().post("/v1/embeddings", {"input": ["a"] * 2049})
    assert reply.status == 400
    assert "2049 entries, the limit is 2048" in reply.error["message"]
    assert "--max-num-inputs" in reply.error["message"]


async def test_many_inputs_are_in_the_engine_by_a_window() -> None:
    app = pooling_app()
    reply = await app.post("/v1/embeddings", {"input": [f"{i:04}" for i in range(1000)]})
    assert [item["embedding"][1] for item in reply.json["data"]] == [EOS_ID] * 1000
    assert len(app.llm.pooling_requests) == 1000
    assert app.llm.most_open == 256


async def test_base64_is_little_endian_float32_unless_told_otherwise() -> None:
    app = pooling_app()
    reply = await app.post("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    (item,) = reply.json["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == [3.0, EOS_ID]
    other = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    reply = await app.post("/v1/embeddings", {"input": "a", **other})
    (item,) = reply.json["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), ">f2").tolist() == [3.0, EOS_ID]


async def test_bytes_are_described_in_a_header() -> None:
    reply = await pooling_app().post("/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "bytes"})
    assert reply.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(reply.headers["metadata"])
    assert [(item["start"], item["end"], item["shape"]) for item in metadata["data"]] == [(0, 8, [2]), (8, 16, [2])]
    assert np.frombuffer(reply.body, "<f4").tolist() == [3.0, EOS_ID, 4.0, EOS_ID]
    reply = await pooling_app().post("/v1/embeddings", {"input": "a", "encoding_format": "bytes_only"})
    assert "metadata" not in reply.headers
    assert len(reply.body) == 8


async def test_header_that_would_be_too_long_is_refused() -> None:
    reply = await pooling_app().post("/v1/embeddings", {"input": ["a"] * 500, "encoding_format": "bytes"})
    assert reply.status == 400
    assert "use bytes_only" in reply.error["message"]


def test_bfloat16_is_the_rounded_upper_half_of_float32() -> None:
    # 1 + 2^-8 lies between two bfloat16 values: the tie goes to the even one. 1 + 3 * 2^-8 goes up.
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8], dtype=np.float32)
    assert to_bytes(values, "bfloat16", "big").hex(" ", 2) == "3f80 c020 3f80 3f82"


async def test_pooling_gives_the_models_own_task_or_the_one_asked_for() -> None:
    app = pooling_app()
    reply = await app.post("/pooling", {"input": "a"})
    assert reply.json["data"] == [{"index": 0, "object": "pooling", "data": [3.0, EOS_ID]}]
    await app.post("/pooling", {"input": "a", "task": "token_embed"})
    assert [request[1].task for request in app.llm.pooling_requests] == ["embed", "token_embed"]


async def test_classes_have_a_label_and_all_probabilities() -> None:
    reply = await pooling_app(CLASSIFIER).post("/classify", {"input": ["a", "bc"]})
    assert reply.json["data"] == [
        {"index": 0, "label": "yes", "probs": [3.0, EOS_ID], "num_classes": 2},
        {"index": 1, "label": "yes", "probs": [4.0, EOS_ID], "num_classes": 2},
    ]
    assert reply.json["id"].startswith("classify-")


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_pairs_are_one_prompt_each_with_their_second_text_marked(names: tuple[str, str]) -> None:
    app = pooling_app(SCORER)
    reply = await app.post("/score", {names[0]: "a", names[1]: ["bc", "d"]})
    assert [item["score"] for item in reply.json["data"]] == [7.0, 6.0]
    assert [request[0] for request in app.llm.pooling_requests] == [
        [BOS_ID, 97, EOS_ID, BOS_ID, 98, 99, EOS_ID],
        [BOS_ID, 97, EOS_ID, BOS_ID, 100, EOS_ID],
    ]
    assert [request[1].second_text_start for request in app.llm.pooling_requests] == [3, 3]
    assert reply.json["usage"]["prompt_tokens"] == 13


async def test_equal_lists_are_scored_pair_by_pair() -> None:
    app = pooling_app(SCORER)
    reply = await app.post("/v1/score", {"text_1": ["a", "bb"], "text_2": ["c", "d"]})
    assert [item["score"] for item in reply.json["data"]] == [6.0, 7.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": 5, "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a", "documents": "b"}, None),
        ({}, None),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2.1"),
        ({"text_1": "a", "text_2": [{"image": "x"}]}, "text_2.0"),
    ],
)
async def test_texts_that_make_no_pairs_are_400(fields: dict[str, object], param: str | None) -> None:
    reply = await pooling_app(SCORER).post("/score", fields)
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_embedding_model_scores_by_cosine() -> None:
    app = pooling_app()
    reply = await app.post("/score", {"text_1": "a", "text_2": ["a", "bcdef"]})
    vectors = np.array([[3.0, EOS_ID], [7.0, EOS_ID]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = [item["score"] for item in reply.json["data"]]
    assert scores == pytest.approx([1.0, float(vectors[0] @ vectors[1])], abs=1e-6)
    assert len(app.llm.pooling_requests) == 3


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_best_first(path: str) -> None:
    app = pooling_app(SCORER)
    body = {"query": "q", "documents": ["a", {"text": "long one"}, "mid", "b"]}
    reply = await app.post(path, body)
    results = reply.json["results"]
    assert [(item["index"], item["document"]["text"]) for item in results] == [
        (1, "long one"),
        (2, "mid"),
        (0, "a"),
        (3, "b"),
    ]
    assert results[0]["relevance_score"] == 13.0
    assert reply.json["id"].startswith("rerank-")
    assert reply.json["usage"]["total_tokens"] == 13 + 8 + 6 + 6
    reply = await app.post(path, {**body, "top_n": 2})
    assert [item["index"] for item in reply.json["results"]] == [1, 2]
    assert (await app.post(path, {**body, "top_n": -1})).error["param"] == "top_n"


@pytest.mark.parametrize("path", PATHS)
async def test_model_that_generates_answers_404_with_its_task(path: str) -> None:
    reply = await make_app().post(path, {"input": "a"})
    assert reply.status == 404
    assert "its task is generate; use /v1/chat/completions" in reply.error["message"]
    assert reply.error["code"] == "unsupported_task"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", chat()), ("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})],
)
async def test_pooling_model_refuses_to_generate_with_its_task(path: str, body: dict) -> None:
    app = pooling_app()
    reply = await app.post(path, body)
    assert reply.status == 404
    assert "its task is embed; use /v1/embeddings" in reply.error["message"]
    assert app.llm.requests == []


@pytest.mark.parametrize(
    ("pooler", "path", "body", "message"),
    [
        (CLASSIFIER, "/v1/embeddings", {"input": "a"}, "its task is classify; use /classify or /pooling"),
        (CLASSIFIER, "/score", {"text_1": "a", "text_2": "b"}, "it has 2 labels and one is needed"),
        (CLASSIFIER, "/rerank", {"query": "a", "documents": ["b"]}, "it has 2 labels and one is needed"),
        (SCORER, "/pooling", {"input": "a", "task": "embed"}, "use /classify, /pooling, /score or /rerank"),
        (PoolerConfig(), "/classify", {"input": "a"}, "does not do the task classify: its task is embed"),
    ],
)
async def test_task_of_another_pooling_model_is_404(pooler: PoolerConfig, path: str, body: dict, message: str) -> None:
    reply = await pooling_app(pooler).post(path, body)
    assert reply.status == 404
    assert message in reply.error["message"]


async def test_unknown_model_is_404() -> None:
    reply = await pooling_app().post("/v1/embeddings", {"input": "a", "model": "other"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
