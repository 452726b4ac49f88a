"""Schemas of request bodies for /openapi.json: pydantic's, and what our own checks read beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel

from serve.entrypoints.openai.fields import INT64_MAX
from serve.entrypoints.openai.responses_protocol import INCLUDABLE, MAX_INCLUDE, MAX_METADATA
from serve.limits import RequestLimits

Schema = dict[str, object]

# What pydantic writes of bounds that a check of ours precedes; JSON Schema knows them by other names.
_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

_TEXT: Final[Schema] = {"type": "string"}
_MAYBE_TEXT: Final[Schema] = {"type": ["string", "null"]}
_OBJECT: Final[Schema] = {"type": "object"}
_TEXT_PART: Final[Schema] = {
    "type": "object",
    "required": ["text"],
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": _TEXT},
}
_CONTENT: Final[Schema] = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _TEXT_PART]}}]}
_TOOL_CALL: Final[Schema] = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "arguments": {"type": ["string", "object", "null"]}},
        },
    },
}
_MESSAGE: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["system", "developer", "user", "function"]}, "content": _CONTENT},
        },
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [_CONTENT, {"type": "null"}]},
                "reasoning": _MAYBE_TEXT,
                "tool_calls": {"type": ["array", "null"], "items": _TOOL_CALL},
            },
        },
        {
            "type": "object",
            "required": ["role", "content", "tool_call_id"],
            "properties": {"role": {"const": "tool"}, "content": _CONTENT, "tool_call_id": _TEXT},
        },
    ]
}
_TOOL: Final[Schema] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": _MAYBE_TEXT,
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_TOOL_CHOICE: Final[Schema] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
            },
        },
    ]
}
_TOKEN_IDS: Final[Schema] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_PROMPT: Final[Schema] = {
    "anyOf": [
        _PROMPT_TEXT,
        {"type": "array", "minItems": 1, "items": _PROMPT_TEXT},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
_STRINGS: Final[Schema] = {"anyOf": [_PROMPT_TEXT, {"type": "array", "maxItems": 16, "items": _PROMPT_TEXT}]}
_CACHE_SALT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]+$"}


def _number(low: float, high: float, **more: object) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, **more}


def _integer(low: int, high: int = INT64_MAX) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


# What serve/sampling_params.py checks, with the limits that the flags have unless set. None: not described, because
# a request may only carry it when the operator trusts requests.
_LIMITS: Final = RequestLimits()
_GENERATION_FIELDS: Final[dict[str, Schema | None]] = {
    "n": _integer(1, _LIMITS.max_n),
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, exclusiveMinimum=0),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "stop": _STRINGS,
    "bad_words": {"type": "array", "items": _PROMPT_TEXT, "maxItems": _LIMITS.max_bad_words},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "maxProperties": _LIMITS.max_logit_bias,
    },
    "prompt_logprobs": _integer(-1, 20),
    "truncate_prompt_tokens": {"anyOf": [{"const": -1}, _integer(1)]},
    "cache_salt": _CACHE_SALT,
    "chat_template": None,
}
CHAT_FIELDS: Final[dict[str, Schema | None]] = {
    **_GENERATION_FIELDS,
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "tools": {"type": "array", "minItems": 1, "maxItems": _LIMITS.max_tools, "items": _TOOL},
    "tool_choice": _TOOL_CHOICE,
    "max_completion_tokens": _integer(1),
    "top_logprobs": _integer(0, 20),
}
COMPLETION_FIELDS: Final[dict[str, Schema | None]] = {
    **_GENERATION_FIELDS,
    "prompt": _PROMPT,
    "prompt_embeds": None,
    "max_tokens": _integer(0),
    "logprobs": _integer(-1, 20),
    "suffix": {"const": ""},
}
_BLOCK: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": _TEXT},
        },
        {
            "type": "object",
            "required": ["type", "id", "name", "input"],
            "properties": {"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": _OBJECT},
        },
        {
            "type": "object",
            "required": ["type", "tool_use_id"],
            "properties": {"type": {"const": "tool_result"}, "tool_use_id": _TEXT, "content": _MAYBE_TEXT},
        },
    ]
}
ANTHROPIC_FIELDS: Final[dict[str, Schema | None]] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "assistant"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _BLOCK}]},
            },
        },
    },
}
_TEXTS: Final[Schema] = {"anyOf": [_PROMPT_TEXT, {"type": "array", "minItems": 1, "items": _PROMPT_TEXT}]}
POOLING_FIELDS: Final[dict[str, Schema | None]] = {
    "input": _PROMPT,
    "messages": CHAT_FIELDS["messages"],
    "truncate_prompt_tokens": _GENERATION_FIELDS["truncate_prompt_tokens"],
    "cache_salt": _CACHE_SALT,
    "chat_template": None,
}
SCORE_FIELDS: Final[dict[str, Schema | None]] = {
    **dict.fromkeys(("text_1", "text_2", "queries", "documents", "data_1", "data_2"), _TEXTS),
    "query": _PROMPT_TEXT,
    "top_n": _integer(0),
    "truncate_prompt_tokens": _GENERATION_FIELDS["truncate_prompt_tokens"],
    "cache_salt": _CACHE_SALT,
}
RERANK_FIELDS: Final[dict[str, Schema | None]] = {
    **SCORE_FIELDS,
    "documents": {"type": "array", "minItems": 1, "items": _PROMPT_TEXT},
}
TOKENIZE_FIELDS: Final[dict[str, Schema | None]] = {
    "messages": CHAT_FIELDS["messages"],
    "chat_template": None,
}

_RESPONSES_PART: Final[Schema] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": _TEXT},
}
_RESPONSES_CONTENT: Final[Schema] = {"anyOf": [_TEXT, {"type": "array", "items": _RESPONSES_PART}]}


def _item(kind: str, **fields: Schema) -> Schema:
    """Describe an item of the Responses API that has a type; all these fields are needed."""
    return {"type": "object", "required": ["type", *fields], "properties": {"type": {"const": kind}, **fields}}


_ITEM: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"const": "message"},
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": _RESPONSES_CONTENT,
            },
        },
        _item("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
        _item("function_call_output", call_id=_TEXT, output=_RESPONSES_CONTENT),
        _item("reasoning", summary={"type": "array", "items": _item("summary_text", text=_TEXT)}),
        _item("item_reference", id=_TEXT),
    ]
}
_FUNCTION_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_RESPONSES_TOOL: Final[Schema] = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": _FUNCTION_NAME,
        "description": _MAYBE_TEXT,
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMED_FUNCTION: Final[Schema] = _item("function", name=_FUNCTION_NAME)
RESPONSES_FIELDS: Final[dict[str, Schema | None]] = {
    "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _ITEM}]},
    "max_output_tokens": _integer(1),
    "tools": {"type": "array", "maxItems": _LIMITS.max_tools, "items": _RESPONSES_TOOL},
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _NAMED_FUNCTION,
            _item(
                "allowed_tools",
                mode={"enum": ["auto", "required"]},
                tools={"type": "array", "minItems": 1, "items": _NAMED_FUNCTION},
            ),
        ]
    },
    "include": {"type": "array", "items": {"enum": list(INCLUDABLE)}, "maxItems": MAX_INCLUDE},
    "top_logprobs": _integer(0, 20),
    "metadata": {"type": "object", "additionalProperties": _TEXT, "maxProperties": MAX_METADATA},
}


def request_schema(body: type[BaseModel], fields: Mapping[str, Schema | None]) -> Schema:
    """Give the schema of a body; fields describes what its type leaves open. null stands for an absent field."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    known = schema["properties"]
    schema["properties"] = {name: fields.get(name, known[name]) for name in known if fields.get(name, True) is not None}
    resolved = _resolve(schema, definitions)
    assert isinstance(resolved, dict), "an object stays an object"
    return resolved


def _resolve(schema: object, definitions: dict[str, object]) -> object:
    """Put definitions in the place of references, which would not resolve in the API description, and allow null."""
    if isinstance(schema, list):
        return [_resolve(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref")
    if isinstance(name, str):
        return _resolve(definitions[name.removeprefix("#/$defs/")], definitions)
    resolved = {_BOUNDS.get(key, key): _resolve(value, definitions) for key, value in schema.items()}
    properties = resolved.get("properties")
    if isinstance(properties, dict):
        required = schema.get("required", [])
        resolved["properties"] = {
            name: field if name in required else _or_null(field) for name, field in properties.items()
        }
    return resolved


def _or_null(schema: Schema) -> Schema:
    options = schema.get("anyOf", [schema])
    null = {"type": "null"}
    if schema.keys() <= {"title", "default"} or (isinstance(options, list) and null in options):
        return schema
    return {"anyOf": [schema, null]}
