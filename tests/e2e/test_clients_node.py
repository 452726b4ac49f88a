"""The official JavaScript client against the server."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.packages import node, npm_package
from tests.source_tree import TESTS

SCRIPT = TESTS / "e2e" / "openai_client.mjs"
LIMIT_S = 120
PAINT = {"colour", "is_glossy"}


@pytest.fixture(scope="module")
def results(tiny_server: Server) -> dict[str, Any]:
    """What the client made of every call, in one run of the script."""
    folder = npm_package("openai", "6.49.0")
    command = [node(), str(SCRIPT), str(folder), f"{tiny_server.base_url}/v1", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_streamed_chat_equals_the_plain_one(results: dict[str, Any]) -> None:
    plain, streamed = results["plain"], results["streamed"]
    assert plain["text"], plain
    assert plain["request"]
    assert streamed["text"] == plain["text"]
    assert streamed["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    assert streamed["finish"] in ("stop", "length")


def test_structured_answer_follows_its_schema(results: dict[str, Any]) -> None:
    assert set(json.loads(results["structured"]["text"])) == PAINT, results["structured"]


def test_calls_are_whole_in_both_forms(results: dict[str, Any]) -> None:
    called = results["called"]
    assert called.get("finish") == "tool_calls", called
    for call_id, name, arguments in [*called["plain"], *called["streamed"]]:
        assert call_id
        assert name == "paint"
        assert set(json.loads(arguments)) == PAINT
    assert [call[1:] for call in called["plain"]] == [call[1:] for call in called["streamed"]]


def test_completions_and_models(results: dict[str, Any]) -> None:
    assert results["completions"].get("indexes") == [0, 1], results["completions"]
    assert all(results["completions"]["texts"])
    assert results["models"] == {"listed": ["tiny"], "one": "tiny"}


def test_responses_stream_what_they_answer(results: dict[str, Any]) -> None:
    responses = results["responses"]
    assert responses.get("text"), responses
    assert responses["streamed"] == responses["text"]
    assert responses["first"] == "response.created"
    assert responses["last"] == f"response.{responses['status']}"


def test_leaving_a_stream_frees_the_server(results: dict[str, Any], tiny_server: Server) -> None:
    assert results["hangUp"] == {"seen": 2}
    tiny_server.wait_idle()
    assert tiny_server.metric("num_requests_running") == 0


def test_errors_become_the_clients_own_classes(results: dict[str, Any]) -> None:
    bad, missing = results["refusals"]["bad"], results["refusals"]["missing"]
    assert (bad["kind"], bad["status"], bad["param"]) == ("BadRequestError", 400, "temperature")
    assert (missing["kind"], missing["status"]) == ("NotFoundError", 404)
