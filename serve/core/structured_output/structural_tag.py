"""Structural tags: free text in which certain marks open constrained parts.

Two forms are read: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"format": {...}} with a tree
of typed parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from serve.core.structured_output.gbnf import gbnf_to_lark
from serve.errors import InvalidRequest

MAX_PARTS: Final = 256
_TEXT: Final = "/(.|\\n)*/"

Part = dict[str, object]


def structural_tag_to_lark(
    spec: object, *, json_rule: Callable[[object], str], regex_rule: Callable[[str], str]
) -> str:
    """Give the Lark text of a structural tag. Raises InvalidRequest naming what is missing or unknown."""
    if not isinstance(spec, dict):
        raise InvalidRequest("structural_tag must be a JSON object")
    writer = _Writer(json_rule, regex_rule)
    if "format" in spec:
        start = writer.part(spec["format"])
    elif "structures" in spec:
        start = writer.part(_from_structures(spec))
    else:
        raise InvalidRequest('structural_tag must have "format", or "structures" and "triggers"')
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"


def _from_structures(spec: Part) -> Part:
    """Give the older form in the newer one's terms."""
    structures = _list(spec, "structures")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict):
            raise InvalidRequest("structural_tag: each of structures must be an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}


class _Writer:
    """Collects the rules of one structural tag."""

    def __init__(self, json_rule: Callable[[object], str], regex_rule: Callable[[str], str]) -> None:
        self.lines: list[str] = []
        self._json_rule = json_rule
        self._regex_rule = regex_rule
        self._num_parts = 0

    def part(self, part: object) -> str:
        """Give the rule body of one part; the rules it needs go to lines."""
        if not isinstance(part, dict):
            raise InvalidRequest("structural_tag: every format must be an object with a type")
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"structural_tag has more than {MAX_PARTS} parts; use fewer")
        match part.get("type"):
            case "const_string":
                return json.dumps(_text(part, "value"))
            case "json_schema":
                return self._json_rule(part.get("json_schema", {}))
            case "regex":
                return self._regex_rule(_text(part, "pattern"))
            case "grammar":
                return self._grammar(_text(part, "grammar"))
            case "any_text":
                return self._rule(_TEXT, is_terminal=True)
            case "sequence":
                return " ".join(self._named(element) for element in _list(part, "elements"))
            case "or":
                return _any_of([self._named(element) for element in _list(part, "elements")])
            case "tag":
                return self._tag(part)
            case "triggered_tags":
                return self._triggered_tags(part)
            case "tags_with_separator":
                return self._tags_with_separator(part)
            case other:
                raise InvalidRequest(
                    f"structural_tag: the format type {other!r} is not known; known are const_string, json_schema, "
                    "regex, grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator"
                )

    def _named(self, part: object) -> str:
        return self._rule(self.part(part))

    def _rule(self, body: str, *, is_terminal: bool = False, option: str = "") -> str:
        """Add a rule and give its name. Names start with a letter that no translated grammar uses."""
        name = f"{'T' if is_terminal else 't'}{len(self.lines)}"
        self.lines.append(f"{name}{option}: {body}")
        return name

    def _grammar(self, text: str) -> str:
        # A grammar of its own, so that its rule names meet no others.
        return self._rule(f'%lark {{\n%llguidance {{"no_forcing": true}}\n{gbnf_to_lark(text)}}}')

    def _tag(self, part: Part, trigger: str = "") -> str:
        """Give begin, content and end of a tag, without the trigger that was matched already."""
        begin, end = _text(part, "begin"), _text(part, "end")
        rest = begin[len(trigger) :]
        pieces = [json.dumps(rest)] if rest else []
        content = part.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                raise InvalidRequest('structural_tag: a tag whose content is any_text needs a non-empty "end"')
            pieces.append(self._rule(f"{_TEXT} {json.dumps(end)}", option="[lazy]"))
        else:
            pieces.append(self._named(content))
            pieces += [json.dumps(end)] if end else []
        return self._rule(" ".join(pieces))

    def _triggered_tags(self, part: Part) -> str:
        triggers = [_require_text(trigger, "a trigger") for trigger in _list(part, "triggers")]
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in _list(part, "tags"):
            if not isinstance(tag, dict):
                raise InvalidRequest("structural_tag: each of tags must be an object with begin, content and end")
            begin = _text(tag, "begin")
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise InvalidRequest(f"structural_tag: the tag {begin!r} begins with none of the triggers {triggers}")
            by_trigger[trigger].append(self._tag(tag, trigger))
        # The text ends with the first trigger, so that nothing unconstrained can follow one.
        heads = [
            f"{self._rule(f'{_TEXT} {json.dumps(trigger)}', option='[lazy]')} {_any_of(tags)}"
            for trigger, tags in by_trigger.items()
            if tags
        ]
        part_rule = self._rule(_any_of(heads))
        if part.get("stop_after_first"):
            return part_rule if part.get("at_least_one") else f"({part_rule} | {self._tail()})"
        return f"{part_rule}{'+' if part.get('at_least_one') else '*'} {self._tail()}"

    def _tail(self) -> str:
        return self._rule(self._rule(_TEXT, is_terminal=True))

    def _tags_with_separator(self, part: Part) -> str:
        tags = _any_of([self._tag(_require_part(tag)) for tag in _list(part, "tags")])
        separator = part.get("separator", "")
        if not isinstance(separator, str):
            raise InvalidRequest("structural_tag: separator must be a string")
        between = f"{json.dumps(separator)} " if separator else ""
        body = tags if part.get("stop_after_first") else f"{tags} ({between}{tags})*"
        return body if part.get("at_least_one") else f"({body})?"


def _any_of(names: list[str]) -> str:
    return "(" + " | ".join(names) + ")"


def _require_part(value: object) -> Part:
    if not isinstance(value, dict):
        raise InvalidRequest("structural_tag: each of tags must be an object with begin, content and end")
    return value


def _require_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"structural_tag: {what} must be a non-empty string")
    return value


def _text(part: Part, key: str) -> str:
    value = part.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f'structural_tag: "{key}" of {part.get("type", "a tag")!r} must be a string')
    return value


def _list(part: Part, key: str) -> list[object]:
    value = part.get(key)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f'structural_tag: "{key}" must be a non-empty list')
    return value
