"""Phase 1 of 11: a prompt in its four forms taken apart: text, token ids, a list of texts, a list of id lists."""

from __future__ import annotations

from serve.errors import InvalidRequest

TextOrIds = str | list[int]


def split_prompts(value: object, name: str) -> list[TextOrIds]:
    """Give the prompts of a field as a list. Raises InvalidRequest that names the field or the entry at fault."""
    if isinstance(value, str):
        return [read_text(value, name)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a string, a list of strings, token ids or lists of token ids", param=name)
    if not value:
        raise InvalidRequest(f"{name} must not be an empty list", param=name)
    if not holds_many(value):
        return [_token_ids(value, name)]
    if isinstance(value[0], str):
        return [read_text(item, f"{name}.{i}") for i, item in enumerate(value)]
    return [_token_ids(item, f"{name}.{i}") for i, item in enumerate(value)]


def holds_many(value: object) -> bool:
    """Tell whether a field is a list of prompts; a list that begins with a token id is one prompt."""
    return isinstance(value, list) and len(value) > 0 and (isinstance(value[0], bool) or not isinstance(value[0], int))


def read_text(value: object, param: str) -> str:
    """Give a text that is not empty. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string", param=param)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return value


def _token_ids(value: object, param: str) -> list[int]:
    if not isinstance(value, list) or any(kind is not int for kind in set(map(type, value))):
        raise InvalidRequest(f"{param} must hold token ids only", param=param)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    lowest, highest = min(value), max(value)
    if lowest < 0 or highest >= 2**31:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(f"{param} holds token id {wrong}, which no vocabulary has", param=param)
    return value
