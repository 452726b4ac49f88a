"""What /openapi.json promises: described answers, null for what is left out, and no way in for templates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.entrypoints.api_description import JSON, ROUTES
from tests.unit.entrypoints.app_client import make_app

# /invocations answers as the route that its body belongs to; what the other gives depends on the model's files.
OPEN_ANSWERS = {"/invocations", "/tokenizer_info"}
BODIES = {path: route.extra()["requestBody"] for path, route in ROUTES.items() if route.body is not None}


def schema_of(path: str) -> dict:
    return BODIES[path]["content"][JSON]["schema"]


def objects(schema: object) -> Iterator[dict]:
    """Give every object inside a JSON value."""
    if isinstance(schema, dict):
        yield schema
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from objects(item)


def test_every_json_answer_is_described_field_by_field() -> None:
    open_ones = {path for path, route in ROUTES.items() if JSON in route.media and route.result is None}
    assert open_ones == OPEN_ANSWERS
    for route in ROUTES.values():
        if route.result is not None:
            schema = route.result.model_json_schema()
            described = [part for part in (schema, *schema.get("$defs", {}).values()) if "properties" in part]
            assert described
            assert all(part["additionalProperties"] is False for part in described)


@pytest.mark.parametrize("path", BODIES)
def test_body_is_whole_and_names_no_template(path: str) -> None:
    schema = schema_of(path)
    assert "chat_template" not in schema["properties"]
    for part in objects(schema):
        assert "$ref" not in part
        assert not part.keys() & {"ge", "gt", "le", "lt"}


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "temperature"), ("/v1/completions", "n"), ("/tokenize", "prompt")]
)
def test_null_stands_for_an_absent_field(path: str, field: str) -> None:
    assert {"type": "null"} in schema_of(path)["properties"][field]["anyOf"]


def test_what_must_be_there_is_never_null() -> None:
    messages = schema_of("/v1/chat/completions")["properties"]["messages"]
    assert messages["type"] == "array"
    assert "messages" in schema_of("/v1/chat/completions")["required"]


async def test_wrong_method_names_the_methods_of_all_routes_of_a_path() -> None:
    reply = await make_app().open("DELETE", "/ping").reply()
    assert reply.status == 405
    assert reply.headers["allow"] == "GET, POST"
