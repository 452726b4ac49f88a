"""What a program hands to LLM: the forms that are read, and clear refusals of all others."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from serve.engine.prompt_embeds import EmbeddedPrompt
from serve.entrypoints.llm_inputs import (
    list_conversations,
    list_prompts,
    read_conversation,
    read_params,
    read_prompt,
)
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.sampling_params import OutputKind, SamplingParams, StructuredOutputs

LIMITS = RequestLimits()
SIZE = 4


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("text", 1),
        ([1, 2], 1),
        ((1, 2), 1),
        (np.array([1, 2]), 1),
        ({"prompt": "text"}, 1),
        ([], 0),
        (["a", "b"], 2),
        ([[1], "b", {"prompt": "c"}], 3),
        (np.array([[1, 2], [3, 4]]), 2),
    ],
)
def test_one_prompt_and_several_are_told_apart(prompts: object, count: int) -> None:
    assert len(list_prompts(prompts)) == count


@pytest.mark.parametrize("prompts", [None, 5, b"text", {1, 2}, iter("ab")])
def test_what_is_no_prompt_is_refused_with_the_forms_there_are(prompts: object) -> None:
    with pytest.raises(InvalidRequest, match=r"exactly one of prompt .*, prompt_token_ids and prompt_embeds; got "):
        list_prompts(prompts)


def test_every_form_of_a_prompt_is_read() -> None:
    assert read_prompt("text", None).content == "text"
    assert read_prompt({"prompt": "text", "cache_salt": "s"}, None).cache_salt == "s"
    for ids in ([1, True], (1, 1), np.array([1, 1]), {"prompt_token_ids": [np.int64(1), 1], "prompt": None}):
        assert read_prompt(ids, None).content == [1, 1]
        assert all(type(token_id) is int for token_id in read_prompt(ids, None).content)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({}, "got none of them"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got 'prompt', 'prompt_token_ids'"),
        ({"text": "a"}, "got 'text'"),
        ({"prompt": [1]}, "prompt must be a text"),
        ({"prompt_token_ids": "abc"}, "got a value of type str"),
        ({"prompt_token_ids": [[1]]}, "holds something else"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a text"),
        ({"prompt_embeds": [[1.0] * SIZE]}, "enable_prompt_embeds=True"),
        (np.array([1.5]), "holds something else"),
        (5.5, "got a value of type float"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_prompt(prompt, None)


def test_embeddings_come_as_any_array_or_as_over_http() -> None:
    rows = np.arange(2 * SIZE, dtype=np.float32).reshape(2, SIZE)
    sent = {"dtype": "float32", "shape": [2, SIZE], "data": base64.b64encode(rows.tobytes()).decode()}
    for value in (rows, rows.tolist(), torch.from_numpy(rows), rows.astype(np.float16), rows[None], sent):
        given = read_prompt({"prompt_embeds": value}, SIZE).content
        assert isinstance(given, EmbeddedPrompt)
        assert given.rows.dtype == np.float32
        np.testing.assert_array_equal(given.rows, rows)
    for wrong, text in (
        (rows[:, :3], "has shape"),
        (torch.zeros(2, SIZE, dtype=torch.bfloat16), "no array of float32"),
        ([["a"] * SIZE], "no array of float32"),
        ([[float("nan")] * SIZE], "NaN"),
        (5.0, "has shape"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            read_prompt({"prompt_embeds": wrong}, SIZE)


def test_conversations_are_lists_of_messages() -> None:
    message = {"role": "user", "content": "a"}
    assert [read_conversation(each) for each in list_conversations([message])] == [[message]]
    assert len(list_conversations([[message], (message,)])) == 2
    for wrong in ("hello", {"prompt": "a"}, None):
        with pytest.raises(InvalidRequest, match="messages is a list of"):
            list_conversations(wrong)
    for wrong in ("h", [message, "a"], {"role": "user"}):
        with pytest.raises(InvalidRequest, match="messages is a list of"):
            read_conversation(wrong)


def constrained(given: object) -> StructuredOutputs | None:
    return read_params(SamplingParams(structured_outputs=given), LIMITS).structured_outputs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "[0-9]+"}, StructuredOutputs("regex", "[0-9]+")),
        ({"json": {"type": "object"}}, StructuredOutputs("json_schema", '{"type":"object"}')),
        ({"json": '{"type": "object"}'}, StructuredOutputs("json_schema", '{"type":"object"}')),
        ({"choice": ["a", "b"]}, StructuredOutputs("choice", '["a","b"]')),
        ({"json_object": True}, StructuredOutputs("json_object")),
        ({"grammar": 'root ::= "a"', "regex": None}, StructuredOutputs("grammar", 'root ::= "a"')),
        (StructuredOutputs("regex", "a+"), StructuredOutputs("regex", "a+")),
        (StructuredOutputs("json_object"), StructuredOutputs("json_object")),
        (StructuredOutputs("choice", '["a"]', disable_any_whitespace=True), None),
    ],
)
def test_constraints_have_the_forms_of_a_request(given: object, expected: StructuredOutputs | None) -> None:
    assert constrained(given) == (expected or given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "exactly one of json, regex, choice.*it has none"),
        ({"regex": "a", "choice": ["b"]}, "it has regex, choice"),
        ({"regex": 5}, r"structured_outputs\.regex"),
        ({"json": {"a": object()}}, "structured_outputs"),
        ({"json": "no"}, r"structured_outputs\.json is not valid JSON"),
        ("[0-9]+", "must be StructuredOutputs or a dict such as"),
        (StructuredOutputs("regexp", "a"), "kind must be one of json_schema"),  # type: ignore[arg-type]
        (StructuredOutputs("choice", "a"), "a JSON list"),
        (StructuredOutputs("regex", "x" * 100_000), r"--max-regex"),
    ],
)
def test_a_constraint_that_cannot_be_read_names_its_field(given: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refusal:
        constrained(given)
    assert "$[" not in str(refusal.value)


def test_parameters_of_the_wrong_type_are_named() -> None:
    whole = read_params(SamplingParams(stop="a", logit_bias={5: 1}), LIMITS)  # type: ignore[arg-type]
    assert (whole.stop, whole.logit_bias, whole.output_kind) == (("a",), {5: 1.0}, OutputKind.FINAL_ONLY)
    for wrong, text in (
        (SamplingParams(temperature="hot"), "^temperature has the wrong type: Expected `float`, got `str`$"),  # type: ignore[arg-type]
        (SamplingParams(stop=(1,)), r"^stop\[0\] has the wrong type"),  # type: ignore[arg-type]
        (SamplingParams(seed=object()), "sampling_params has a value of the wrong type"),  # type: ignore[arg-type]
        ({"temperature": 0}, "must be one SamplingParams, or a list"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            read_params(wrong, LIMITS)
