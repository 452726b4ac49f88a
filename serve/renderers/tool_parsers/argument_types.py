"""Phase 11 of 11: the JSON value of an argument that a model wrote as bare text, by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from serve.renderers.json_scanner import JsonScanner

Schema = Mapping[str, object]

STRING: Final = frozenset({"string"})
ANY_TYPE: Final = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_MAX_DEPTH: Final = 8
_NUMBER_START: Final = frozenset("-0123456789")


def argument_types(parameters: Schema, key: str) -> frozenset[str]:
    """Give the JSON types that a tool's parameter may have; a string when the schema does not know the parameter."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return STRING
    return _types(properties[key], parameters, _MAX_DEPTH) or ANY_TYPE


def _types(schema: object, root: Schema, depth: int) -> frozenset[str]:
    """Give the types that a schema names, through references and alternatives; none when it leaves them open."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(t for t in declared if isinstance(t, str))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth - 1)
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    found: frozenset[str] = frozenset()
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, root, depth - 1)
    return found


def _resolve(reference: str, root: Schema) -> object:
    """Follow a reference inside the schema, such as #/$defs/Color; None when it leads nowhere."""
    target: object = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _type_of(value: object) -> str:
    """Give the JSON type of a value."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def typed_json(text: str, types: frozenset[str]) -> str:
    """Give a value's JSON text: what fits one of the types, else a string."""
    bare = text.strip()
    word = bare.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if _json_type(bare) in types or (_json_type(bare) == "number" and "integer" in types):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _json_type(text: str) -> str | None:
    """Give number, object or array when the text is one in JSON, else None."""
    if text[:1] in _NUMBER_START:
        # A number ends only with what follows it.
        return "number" if _is_json(text, f"{text} ") else None
    kind = {"{": "object", "[": "array"}.get(text[:1])
    return kind if kind and _is_json(text, text) else None


def _is_json(text: str, followed: str) -> bool:
    scanner = JsonScanner()
    end, passed = scanner.scan(followed, 0)
    return scanner.is_done and end == len(text) and passed == text
