"""Loaded by Schemathesis: lets bodies that follow the schema also follow the rules that no schema can state.

Without this nearly every body would be refused for the first of those rules, and little of the server would run.
"""

from __future__ import annotations

import os

import schemathesis
from schemathesis.generation import GenerationMode

# The name of the served model.
MODEL_VARIABLE = "SERVE_FUZZ_MODEL"
VOCAB_SIZE = 331
MAX_TOKENS = 8
# Of these fields, the first makes the others wrong.
EITHER = {
    "input": ("messages",),
    "prompt": ("messages",),
    "text_1": ("queries", "documents", "data_1", "data_2"),
    "queries": ("data_1", "data_2"),
    "query": ("queries",),
}
# What no model of these tests can do, or what has rules of its own that other tests look at.
UNFIT = (
    *("dimensions", "task", "encoding_format", "previous_response_id", "background", "prompt_embeds"),
    *("use_beam_search", "length_penalty", "repetition_detection"),
)


@schemathesis.hook
def before_call(context: object, case: schemathesis.Case, kwargs: dict[str, object]) -> None:
    """Send the body to the model that is there, and repair what contradicts itself in a well-formed one."""
    body = case.body
    if not isinstance(body, dict) or case.meta is None:
        return
    if isinstance(body.get("model"), str):
        body["model"] = os.environ[MODEL_VARIABLE]
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        _repair(body)
    else:
        _spoil(body, _body_schema(case))


def _body_schema(case: schemathesis.Case) -> object:
    described = case.operation.schema.raw_schema["paths"][case.operation.path][case.operation.method.lower()]
    return described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})


def _spoil(value: object, schema: object) -> None:
    """Turn values of a wrong type that the server reads all the same into ones that it cannot read.

    As in vLLM, "8" is a number where one is wanted, and 0, 1, "yes" and the like are booleans; the description does
    not promise it.
    """
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return
    for option in (schema, *schema.get("anyOf", [])):
        for name, field in option.get("properties", {}).items():
            if _is_readable(value.get(name), _types(field)):
                value[name] = "neither"
            _spoil(value.get(name), field)


def _is_readable(value: object, types: set[str]) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "string" in types:
        return False
    reads_bool = str(value).lower() in {"0", "1", "t", "f", "y", "n", "true", "false", "yes", "no", "on", "off"}
    return ("boolean" in types and reads_bool) or (bool(types & {"integer", "number"}) and _is_number(value))


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type", [])
    options = schema.get("anyOf", [])
    return ({found} if isinstance(found, str) else set(found)).union(*map(_types, options))


def _is_number(value: object) -> bool:
    try:
        float(str(value)) if isinstance(value, str) else None
    except ValueError:
        return False
    return isinstance(value, str)


def _repair(body: dict[str, object]) -> None:
    for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs"), ("tool_choice", "tools")):
        if not body.get(needed):
            body.pop(name, None)
    if body.get("logprobs") is None:
        body.pop("logprob_token_ids", None)
    if body.get("continue_final_message"):
        body["add_generation_prompt"] = False
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "truncate_prompt_tokens"):
        value = body.get(name)
        if isinstance(value, int) and value > MAX_TOKENS:
            body[name] = MAX_TOKENS
    for name, others in EITHER.items():
        if body.get(name) is not None:
            for other in others:
                body.pop(other, None)
    for name in UNFIT:
        body.pop(name, None)
    if isinstance(body.get("text_1"), list):
        body["text_1"] = body["text_1"][0]
    if body.get("max_tokens") == 0:
        body["echo"] = True
    if body.get("structured_outputs") is not None:
        body["structured_outputs"] = {"json_object": True}
        body.pop("response_format", None)
    if isinstance(body.get("tool_choice"), dict) and "messages" in body and "function" in body["tool_choice"]:
        body["tool_choice"] = "required"
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = 0
    _repair_ids(body)


def _repair_ids(body: dict[str, object]) -> None:
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "tokens", "token_ids", "prompt", "input"):
        ids = body.get(name)
        if isinstance(ids, list) and all(isinstance(item, int) for item in ids):
            body[name] = [item % VOCAB_SIZE for item in ids]
            if not ids:
                del body[name]
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        body["logit_bias"] = {str(int(name) % VOCAB_SIZE): value for name, value in bias.items() if name.isdecimal()}
