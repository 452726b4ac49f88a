"""Constraints as Lark grammars, the one language that the grammar library is given.

Every grammar says no_forcing: all tokens that spell an allowed text stay allowed, so the model keeps its own way to
cut a word into tokens.
"""

from __future__ import annotations

import json
import re
from typing import Final

from serve.core.structured_output.gbnf import gbnf_to_lark
from serve.core.structured_output.structural_tag import structural_tag_to_lark
from serve.errors import InvalidRequest
from serve.sampling_params import StructuredOutputs

# A longer run would let a model pad its answer until its tokens are used up.
WHITESPACE: Final = r"[ \t\n\r]{1,2}"
# Intersections of patterns cost exponential time.
MAX_INTERSECTIONS: Final = 14
# Each pair of them is compared.
MAX_PATTERN_PROPERTIES: Final = 100
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
_LARK: Final = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
_OPTIONS_LINE: Final = re.compile(r"(?m)^\s*%llguidance\b.*$")
_LITERAL: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
# Words whose value maps names to schemas, and words whose value is no schema at all.
_NAMED_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA_WORDS: Final = frozenset({"const", "enum", "default", "examples"})
# Words beside a $ref that hold of the referred schema too.
_REF_SIBLINGS: Final = frozenset({"pattern", "allOf", "properties", "items", "additionalProperties", "format"})


def to_lark(constraint: StructuredOutputs) -> str:
    """Give the grammar text of a constraint. Raises InvalidRequest when its text cannot be read."""
    match constraint.kind:
        case "json_schema":
            body = "start: " + json_rule(_read_json(constraint.spec, "json"), constraint)
        case "json_object":
            body = "start: " + json_rule({"type": "object"}, constraint)
        case "regex":
            body = f"start: {regex_literal(constraint.spec)}"
        case "choice":
            body = f"start: {_choice_rule(constraint.spec)}"
        case "grammar":
            body = _grammar(constraint.spec)
        case "structural_tag":
            body = structural_tag_to_lark(
                _read_json(constraint.spec, "structural_tag"),
                json_rule=lambda schema: json_rule(schema, constraint),
                regex_rule=regex_literal,
            )
    return _OPTIONS + body


def json_rule(schema: object, options: StructuredOutputs) -> str:
    """Give the rule body that matches what a JSON schema describes. Raises InvalidRequest when it is no schema."""
    if isinstance(schema, bool):
        if not schema:
            raise InvalidRequest("the JSON schema is false, which no text satisfies; give a schema that allows a value")
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"a JSON schema must be an object, got {type(schema).__name__}")
    _check_intersections(schema)
    if options.disable_additional_properties:
        schema = _closed(schema)
        assert isinstance(schema, dict), "closing keeps the type"
    settings: dict[str, object]
    if options.disable_any_whitespace:
        # As models are used to see JSON, and as json.dumps writes it.
        settings = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    else:
        settings = {"whitespace_flexible": True, "whitespace_pattern": options.whitespace_pattern or WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": settings})


def regex_literal(pattern: str) -> str:
    """Give a regular expression as Lark writes it: slashes and line ends escaped, \\d the ten ASCII digits."""
    parts: list[str] = []
    index = 0
    in_class = False
    while index < len(pattern):
        char = pattern[index]
        if char == "\\" and index + 1 < len(pattern):
            escape = pattern[index : index + 2]
            digits = "0-9" if in_class else "[0-9]"
            parts.append({"\\d": digits, "\\\n": "\\n"}.get(escape, escape))
            index += 2
            continue
        if char == "[":
            in_class = True
        elif char == "]":
            in_class = False
        parts.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(char, char))
        index += 1
    return f"/{''.join(parts)}/"


def _choice_rule(spec: str) -> str:
    choices = _read_json(spec, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("choice must be a non-empty list of strings")
    return " | ".join(json.dumps(choice) for choice in choices)


def _grammar(text: str) -> str:
    """Give a grammar's Lark text: it is Lark when it says so or has a rule start, else EBNF as in GBNF files."""
    body = _OPTIONS_LINE.sub("", text) if _LARK.search(text) else gbnf_to_lark(text)
    num_intersections = sum(char in "&~" for char in _LITERAL.sub("", body))
    if num_intersections > MAX_INTERSECTIONS:
        raise InvalidRequest(
            f"the grammar has {num_intersections} operators & and ~, the limit is {MAX_INTERSECTIONS}; use fewer"
        )
    return body


def _read_json(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from error


def _nodes(schema: object) -> list[dict[str, object]]:
    """Give every object inside a schema, itself included."""
    found: list[dict[str, object]] = []
    pending: list[object] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found.append(node)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return found


def _check_intersections(schema: dict[str, object]) -> None:
    """Refuse a schema that could intersect many patterns.

    allOf and $ref with siblings join what they name; patternProperties must not overlap, which is checked in pairs.
    """
    nodes = _nodes(schema)
    for node in nodes:
        names = node.get("patternProperties")
        if isinstance(names, dict) and len(names) > MAX_PATTERN_PROPERTIES:
            raise InvalidRequest(
                f"the JSON schema has an object with {len(names)} patternProperties, the limit is "
                f"{MAX_PATTERN_PROPERTIES}; use fewer"
            )
    num_patterns = sum(isinstance(node.get("pattern"), str) for node in nodes)
    num_joins = 0
    for node in nodes:
        branches: object = node.get("allOf")
        num_joins += max(len(branches) - 1, 0) if isinstance(branches, list) else 0
        num_joins += "$ref" in node and not _REF_SIBLINGS.isdisjoint(node)
    if min(num_patterns, num_joins + 1) > MAX_INTERSECTIONS:
        raise InvalidRequest(
            f"the JSON schema joins {num_patterns} patterns with allOf or $ref, the limit is {MAX_INTERSECTIONS}; "
            "merge them or use fewer"
        )


def _closed(node: object) -> object:
    """Give a schema in which every object that names its properties allows no others, unless it says so itself."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed: dict[str, object] = {}
    for key, value in node.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _closed(schema) for name, schema in value.items()}
        else:
            closed[key] = value if key in _DATA_WORDS else _closed(value)
    if isinstance(node.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
