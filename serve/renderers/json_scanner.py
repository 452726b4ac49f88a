"""Phase 11 of 11: finds the end of a JSON value in text that comes in pieces, and the character that breaks it."""

from __future__ import annotations

import json
import re
from typing import Final

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE: Final = " \t\r\n"
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_NUM_HEX: Final = 4
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS: Final = "0123456789"
# A number's states: what may follow in each, and where it may end (RFC 8259 section 6).
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "sign": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": {".": "point", "e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "integer")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent", **dict.fromkeys(_DIGITS, "fraction")},
    "exponent": {"+": "exponent_sign", "-": "exponent_sign", **dict.fromkeys(_DIGITS, "power")},
    "exponent_sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
_NUMBER_ENDS: Final = frozenset({"zero", "integer", "fraction", "power"})


class JsonScanner:
    """Reads one JSON value (RFC 8259) without leading space; a stack instead of recursion, so any depth will do.

    A control character inside a string, which models write for a line break, is given as its escape. A number is
    only done when the character after it is seen.
    """

    __slots__ = ("_escape", "_expects", "_is_key", "_literal", "_number", "_stack", "is_broken", "is_done")

    def __init__(self) -> None:
        self._expects = "value"  # value, first_value, first_key, key, colon, next, string, literal, number
        self._stack: list[str] = []  # the closing characters of what is open
        self._is_key = False
        self._escape = 0  # characters to come of an escape; -1: the one that says which
        self._literal = ""
        self._number = ""
        self.is_done = False
        self.is_broken = False

    def scan(self, text: str, start: int) -> tuple[int, str]:
        """Read from start on; give where reading stopped and the text to pass on.

        Stops at the end of text, behind the value (is_done) or before the character that no value has (is_broken).
        """
        pieces: list[str] = []
        position = start
        plain_from = start
        while position < len(text) and not (self.is_done or self.is_broken):
            if self._expects != "string" or self._escape:
                position += self._step(text[position])
                continue
            found = _PLAIN.match(text, position)
            assert found, "the pattern matches the empty string"
            position = found.end()
            if position < len(text) and text[position] < " ":
                pieces += [text[plain_from:position], json.dumps(text[position])[1:-1]]
                position += 1
                plain_from = position
            elif position < len(text):
                self._leave_string(text[position])
                position += 1
        pieces.append(text[plain_from:position])
        return position, "".join(pieces)

    def _leave_string(self, character: str) -> None:
        if character == "\\":
            self._escape = -1
        elif self._is_key:
            self._expects = "colon"
        else:
            self._close_value()

    def _step(self, character: str) -> int:
        """Take one character outside the plain text of strings; give 1, or 0 when it is not part of the value."""
        expects = self._expects
        if expects == "string":
            return self._step_escape(character)
        if expects == "number":
            return self._step_number(character)
        if expects == "literal":
            return self._step_literal(character)
        if character in _SPACE and self._stack:
            return 1
        if expects == "next":
            return self._step_next(character)
        if expects == "colon":
            return self._move("value") if character == ":" else self._break()
        if expects in ("first_key", "key"):
            return self._step_key(character)
        return self._step_value(character)

    def _move(self, expects: str) -> int:
        self._expects = expects
        return 1

    def _break(self) -> int:
        self.is_broken = True
        return 0

    def _close_value(self) -> int:
        self.is_done = not self._stack
        return self._move("next")

    def _step_escape(self, character: str) -> int:
        if self._escape > 0:
            self._escape -= 1
            return 1 if character in _HEX else self._break()
        self._escape = _NUM_HEX if character == "u" else 0
        return 1 if character in 'u"\\/bfnrt' else self._break()

    def _step_literal(self, character: str) -> int:
        if character != self._literal[0]:
            return self._break()
        self._literal = self._literal[1:]
        return 1 if self._literal else self._close_value()

    def _step_number(self, character: str) -> int:
        state = _NUMBER[self._number].get(character)
        if state is not None:
            self._number = state
            return 1
        if self._number not in _NUMBER_ENDS:
            return self._break()
        self._close_value()
        return 0

    def _step_next(self, character: str) -> int:
        if character == self._stack[-1]:
            self._stack.pop()
            return self._close_value()
        if character != ",":
            return self._break()
        return self._move("key" if self._stack[-1] == "}" else "value")

    def _step_key(self, character: str) -> int:
        if character == "}" and self._expects == "first_key":
            self._stack.pop()
            return self._close_value()
        self._is_key = True
        return self._move("string") if character == '"' else self._break()

    def _step_value(self, character: str) -> int:
        if character == "]" and self._expects == "first_value":
            self._stack.pop()
            return self._close_value()
        if character == "{":
            self._stack.append("}")
            return self._move("first_key")
        if character == "[":
            self._stack.append("]")
            return self._move("first_value")
        if character == '"':
            self._is_key = False
            return self._move("string")
        if character in _LITERALS:
            self._literal = _LITERALS[character]
            return self._move("literal")
        self._number = "sign" if character == "-" else _NUMBER["sign"].get(character, "")
        return self._move("number") if self._number else self._break()
