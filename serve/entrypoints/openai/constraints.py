"""Phase 1 of 11: what the text of an answer must be: response_format, structured_outputs and forced tool calls.

All bounds are checked here, before the engine sees the request. The engine core compiles what this gives, and its
refusal is a 400 as well.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.fields import ResponseFormat, StructuredOutputsBody
from serve.entrypoints.openai.protocol import GenerationRequest
from serve.entrypoints.openai.tools import NO_TOOLS, Tool, ToolUse, is_object
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.sampling_params import StructuredOutputs

FIELD: Final = "structured_outputs"
FORMAT: Final = "response_format"
_KINDS: Final = "json, regex, choice, grammar, json_object or structural_tag"
_encode = msgspec.json.encode


def build_constraint(request: GenerationRequest, tool_use: ToolUse, limits: RequestLimits) -> StructuredOutputs | None:
    """Give the one constraint on the answer's text, None for free text. Raises InvalidRequest."""
    from_format = _from_response_format(request.response_format, limits)
    from_field = _from_structured_outputs(request.structured_outputs, limits)
    if from_format is not None and from_field is not None:
        raise InvalidRequest(f"{FORMAT} and {FIELD} cannot be sent together; send one of them", param=FIELD)
    constraint = from_format or from_field
    if tool_use.forced is None:
        return constraint
    if constraint is not None:
        raise InvalidRequest(
            f"{FORMAT} and {FIELD} cannot be sent with a tool_choice that forces a call; leave one of them out",
            param="tool_choice",
        )
    return _forced_calls(tool_use, limits)


def with_field(error: InvalidRequest, request: GenerationRequest, tool_use: ToolUse = NO_TOOLS) -> InvalidRequest:
    """Give the engine's refusal of a request with the field it is about: the one that asked for the constraint."""
    if error.param is not None:
        return error
    if request.structured_outputs is not None:
        return InvalidRequest(str(error), param=FIELD, code=error.code)
    if request.response_format is not None and request.response_format.type != "text":
        return InvalidRequest(str(error), param=FORMAT, code=error.code)
    return InvalidRequest(str(error), param="tools", code=error.code) if tool_use.forced else error


def _from_response_format(sent: ResponseFormat | None, limits: RequestLimits) -> StructuredOutputs | None:
    if sent is None or sent.type == "text":
        return None
    if sent.type == "json_object":
        return StructuredOutputs("json_object")
    if sent.type == "json_schema":
        if sent.json_schema is None:
            raise InvalidRequest(
                f"{FORMAT}.json_schema is missing; send an object with name and schema", param=f"{FORMAT}.json_schema"
            )
        constraint = _schema(sent.json_schema.schema_, f"{FORMAT}.json_schema.schema", limits)
        # What strict means where it comes from: objects hold what their schema names, and no more.
        return _closed(constraint) if sent.json_schema.strict else constraint
    tag: JsonObject = {"type": "structural_tag"}
    for name, value in (("structures", sent.structures), ("triggers", sent.triggers), ("format", sent.format)):
        if value is not None:
            tag[name] = value
    return _structural_tag(tag, FORMAT, limits)


def _from_structured_outputs(sent: StructuredOutputsBody | None, limits: RequestLimits) -> StructuredOutputs | None:
    if sent is None:
        return None
    given = [name for name, value in _constraints_of(sent) if value is not None]
    if len(given) != 1:
        shown = f"has {', '.join(given)}" if given else "has none"
        raise InvalidRequest(f"{FIELD} must have exactly one of {_KINDS}; it {shown}", param=FIELD)
    constraint = _one_of(sent, limits)
    if sent.whitespace_pattern is not None:
        check_regex(sent.whitespace_pattern, f"{FIELD}.whitespace_pattern", limits)
    return msgspec.structs.replace(
        constraint,
        whitespace_pattern=sent.whitespace_pattern,
        disable_any_whitespace=sent.disable_any_whitespace,
        disable_additional_properties=sent.disable_additional_properties,
    )


def _constraints_of(sent: StructuredOutputsBody) -> tuple[tuple[str, object], ...]:
    return (
        ("json", sent.json_),
        ("regex", sent.regex),
        ("choice", sent.choice),
        ("grammar", sent.grammar),
        ("json_object", sent.json_object),
        ("structural_tag", sent.structural_tag),
    )


def _one_of(sent: StructuredOutputsBody, limits: RequestLimits) -> StructuredOutputs:
    if sent.json_ is not None:
        return _schema(_decoded(sent.json_, f"{FIELD}.json", limits), f"{FIELD}.json", limits)
    if sent.regex is not None:
        check_regex(sent.regex, f"{FIELD}.regex", limits)
        return StructuredOutputs("regex", sent.regex)
    if sent.choice is not None:
        return _choice(sent.choice, limits)
    if sent.grammar is not None:
        check_grammar(sent.grammar, f"{FIELD}.grammar", limits)
        return StructuredOutputs("grammar", sent.grammar)
    if sent.structural_tag is not None:
        tag = _decoded(sent.structural_tag, f"{FIELD}.structural_tag", limits)
        return _structural_tag(tag, f"{FIELD}.structural_tag", limits)
    if not sent.json_object:
        raise InvalidRequest(f"{FIELD}.json_object must be true; leave it out for free text", param=FIELD)
    return StructuredOutputs("json_object")


def _decoded(value: JsonObject | str, param: str, limits: RequestLimits) -> JsonObject:
    """Give a JSON object that may be sent as text."""
    if not isinstance(value, str):
        return value
    _check_size(len(value.encode("utf-8", "replace")), limits.max_schema_bytes, param, "--max-schema-bytes")
    try:
        decoded: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        shown = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"{param} is not valid JSON: {shown}", param=param) from None
    if not is_object(decoded):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return decoded


def _schema(schema: JsonObject, param: str, limits: RequestLimits) -> StructuredOutputs:
    text = _bounded_json(schema, param, limits)
    for pattern in _patterns(schema):
        check_regex(pattern, param, limits)
    return StructuredOutputs("json_schema", text)


def _patterns(schema: JsonObject) -> list[str]:
    """Give the regular expressions inside a schema; values that are data, not schemas, hold none."""
    found: list[str] = []
    level: list[object] = [schema]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            pattern = item.get("pattern")
            if isinstance(pattern, str) and pattern:
                found.append(pattern)
            level += [child for key, child in item.items() if key not in _DATA_WORDS]
        elif isinstance(item, list):
            level += item
    return found


_DATA_WORDS: Final = frozenset({"const", "enum", "default", "examples"})


def _bounded_json(value: JsonObject, param: str, limits: RequestLimits) -> str:
    """Give the JSON text of a schema within the bounds on bytes and levels."""
    try:
        text = _encode(value)
    except RecursionError:
        raise _too_deep(param, limits) from None
    _check_size(len(text), limits.max_schema_bytes, param, "--max-schema-bytes")
    if _depth(value, limits.max_schema_depth + 1) > limits.max_schema_depth:
        raise _too_deep(param, limits)
    return text.decode()


def _too_deep(param: str, limits: RequestLimits) -> InvalidRequest:
    return InvalidRequest(
        f"{param} nests deeper than {limits.max_schema_depth} levels; send a flatter one or start the server with a "
        "larger --max-schema-depth",
        param=param,
    )


def _check_size(size: int, limit: int, param: str, flag_name: str, unit: str = "bytes") -> None:
    if size > limit:
        raise InvalidRequest(
            f"{param} has {size} {unit}, the limit is {limit}; send a shorter one or start the server with a larger "
            f"{flag_name}",
            param=param,
        )


def _depth(value: object, limit: int) -> int:
    """Give how many containers are inside each other at most, counting no further than limit."""
    depth, level = 0, [value]
    while depth < limit:
        level = [child for item in level for child in _children(item)]
        if not level:
            break
        depth += 1
    return depth


def _children(item: object) -> list[object]:
    if isinstance(item, dict):
        return list(item.values())
    return list(item) if isinstance(item, list) else []


def _choice(choices: list[str], limits: RequestLimits) -> StructuredOutputs:
    param = f"{FIELD}.choice"
    if not choices:
        raise InvalidRequest(f"{param} must not be an empty list; send the texts to choose from", param=param)
    _check_size(len(choices), limits.max_choices, param, "--max-choices", "entries")
    num_chars = sum(map(len, choices))
    _check_size(num_chars, limits.max_choice_chars, param, "--max-choice-chars", "characters in total")
    if not all(choices):
        raise InvalidRequest(f"{param} must not hold an empty string", param=param)
    return StructuredOutputs("choice", _encode(choices).decode())


def _structural_tag(tag: JsonObject, param: str, limits: RequestLimits) -> StructuredOutputs:
    has_format, has_structures = "format" in tag, "structures" in tag
    if has_format == has_structures:
        raise InvalidRequest(
            f"{param} needs either format, or structures with triggers: "
            '{"structures": [{"begin": TEXT, "schema": SCHEMA, "end": TEXT}], "triggers": [TEXT]}',
            param=param,
        )
    if has_structures:
        _check_structures(tag, param)
    return StructuredOutputs("structural_tag", _bounded_json(tag, param, limits))


def _check_structures(tag: JsonObject, param: str) -> None:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise InvalidRequest(f"{param}.structures must be a list that is not empty", param=f"{param}.structures")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise InvalidRequest(f"{param}.triggers must be a list of texts, at least one", param=f"{param}.triggers")
    for i, structure in enumerate(structures):
        path = f"{param}.structures.{i}"
        begin = structure.get("begin") if is_object(structure) else None
        if not is_object(structure) or not isinstance(begin, str) or not isinstance(structure.get("end"), str):
            raise InvalidRequest(f"{path} must be an object with the texts begin and end, and a schema", param=path)
        if not is_object(structure.get("schema")):
            raise InvalidRequest(f"{path}.schema must be a JSON schema, an object", param=f"{path}.schema")
        if not any(begin.startswith(text) for text in triggers):
            raise InvalidRequest(f"{path}.begin starts with none of the triggers", param=f"{path}.begin")


def check_regex(pattern: str, param: str, limits: RequestLimits) -> None:
    """Refuse a regular expression that is empty, too long or unfinished, or that repeats a repetition.

    Engines read a repeated repetition in different ways, or run away on it.
    """
    if not pattern:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    _check_size(len(pattern), limits.max_regex_chars, param, "--max-regex-chars", "characters")
    before = "start"
    for found in _REGEX_TOKEN.finditer(pattern):
        token = found.group()
        if token in ("[", "\\"):
            raise InvalidRequest(f"{param} ends inside a {'class' if token == '[' else 'escape'}", param=param)
        if token in ("*", "+", "?") or _COUNTED.fullmatch(token):
            is_lazy = token == "?" and before == "repetition"
            if before != "atom" and not is_lazy:
                raise InvalidRequest(
                    f"{param} repeats nothing, or a repetition, with {token} at position {found.start()}; put what is "
                    "repeated into parentheses",
                    param=param,
                )
            before = "lazy" if is_lazy else "repetition"
        else:
            before = "start" if token[0] in "(|" else "atom"


# An escape, a class, the head of a group, a counted repetition, or one character.
_REGEX_TOKEN: Final = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P?<\w+>|[a-zA-Z-]*[:)]|<?[=!])|\{\d*,?\d*\}|.", re.DOTALL
)
_COUNTED: Final = re.compile(r"\{\d*,?\d*\}")


def check_grammar(text: str, param: str, limits: RequestLimits) -> None:
    """Refuse a grammar that is blank, too long, or defines a rule twice: only one of the two would count."""
    if not text.strip():
        raise InvalidRequest(f"{param} must not be empty", param=param)
    _check_size(len(text), limits.max_grammar_chars, param, "--max-grammar-chars", "characters")
    if text.rstrip().endswith(("::=", "|")):
        raise InvalidRequest(f"{param} ends inside a rule", param=param)
    seen: set[str] = set()
    for line in text.splitlines():
        found = _RULE_HEAD.match(line)
        if found is None:
            continue
        name = found.group(1)
        if name in seen:
            raise InvalidRequest(f"{param} defines the rule {name[:64]!r} twice; join them with |", param=param)
        seen.add(name)


# The head of a rule at the start of a line: "name ::=" in EBNF and GBNF, "name:" in Lark.
_RULE_HEAD: Final = re.compile(
    r"[ \t]{0,64}[?!]{0,2}<?([A-Za-z_][A-Za-z0-9_-]{0,255})>?(?:\.\d{1,9})?[ \t]{0,64}(?:::=|:(?![:=]))"
)


def _forced_calls(tool_use: ToolUse, limits: RequestLimits) -> StructuredOutputs:
    """Give the grammar of forced calls: the arguments of the named tool, or a list of calls.

    They hold no properties that a schema does not name.
    """
    if tool_use.mode == "named":
        tool = tool_use.tools[0]
        return _closed(_schema(arguments_schema(tool, "tools"), "tools", limits))
    schemas = [arguments_schema(tool, "tools") for tool in tool_use.tools]
    definitions: JsonObject = {f"tool{i}": _moved(schema, f"#/$defs/tool{i}") for i, schema in enumerate(schemas)}
    calls = [_call_schema(tool, f"#/$defs/tool{i}") for i, tool in enumerate(tool_use.tools)]
    items: JsonObject = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": items, "$defs": definitions}
    if tool_use.max_calls is not None:
        schema["maxItems"] = tool_use.max_calls
    elif not any(given.get("properties", True) for given in schemas):
        schema["maxItems"] = len(calls)  # a second call without arguments would say nothing new
    return _closed(_schema(schema, "tools", limits))


def _closed(constraint: StructuredOutputs) -> StructuredOutputs:
    return msgspec.structs.replace(constraint, disable_additional_properties=True)


def _call_schema(tool: Tool, reference: str) -> JsonObject:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": {"$ref": reference}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def arguments_schema(tool: Tool, param: str) -> JsonObject:
    """Give the schema that forced arguments keep to: the tool's own, and always an object.

    A tool without parameters takes {}. strict false gives up the tool's schema, not the object.
    """
    schema = tool.parameters
    if tool.strict is False:
        return {"type": "object"}
    if not schema or (schema.get("type") == "object" and not schema.keys() - {"type", "properties", "title"}):
        properties = schema.get("properties") or {}
        if not properties:
            return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"the parameters of the tool {tool.name!r} must describe an object, not {str(kind)[:40]!r}", param=param
        )
    return {"type": "object", **schema}


def _moved(schema: JsonObject, root: str) -> JsonObject:
    """Give a copy of a schema whose references to its own parts fit its new place in a larger one."""

    def copy(value: object) -> object:
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, dict):
            return value
        moved = {key: copy(item) for key, item in value.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved

    # An id of its own would make references start from it again.
    result = copy({key: value for key, value in schema.items() if key not in ("$id", "$schema")})
    assert is_object(result), "the copy of an object is one"
    return result
