"""Grammars in EBNF as GBNF files write it (name ::= ..., character classes in brackets), turned into Lark."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from serve.errors import InvalidRequest

_TOKEN: Final = re.compile(
    r"""(?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<rule>[A-Za-z_][A-Za-z0-9_-]*)(?=[ \t]*::=)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<class>\[(?:\\.|[^\]\\\n])+\])
    |(?P<repeat>[*+?]|\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    |(?P<any>\.)
    |(?P<other>[()|])""",
    re.VERBOSE,
)
_ROOT: Final = "root"
_CHAR: Final = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|.", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"} | {char: char for char in "\\\"'/[]^-"}
# In a class of a regular expression these would open another class, join two, or end it.
_CLASS_SIGNS: Final = frozenset("[]&~-^/")


@dataclass(slots=True)
class _Rule:
    """A rule while it is read: its pieces in Lark, names of other rules as (name,), and the depth of open brackets."""

    line: int
    pieces: list[str | tuple[str]] = field(default_factory=list)
    depth: int = 0
    can_repeat: bool = False

    def names(self) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, tuple):
                yield piece[0]


def gbnf_to_lark(text: str) -> str:
    """Give the Lark text of a grammar whose first rule to match is root. Raises InvalidRequest naming the line."""
    rules = _read_rules(text)
    if _ROOT not in rules:
        raise InvalidRequest(
            "the grammar has no rule named root (EBNF) or start (Lark); name the rule that matches the whole answer so"
        )
    for rule in rules.values():
        for name in rule.names():
            if name not in rules:
                raise InvalidRequest(f"the grammar's rule on line {rule.line} uses {name!r}, which is not defined")
    terminals = _find_terminals(rules)
    names = {
        name: "start" if name == _ROOT else f"{'R' if name in terminals else 'r'}{index}"
        for index, name in enumerate(rules)
    }
    lines = []
    for name, rule in rules.items():
        pieces = (names[piece[0]] if isinstance(piece, tuple) else piece for piece in rule.pieces)
        lines.append(f"{names[name]}: {' '.join(pieces)}")
    return "\n".join(lines) + "\n"


def _read_rules(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    current: _Rule | None = None
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise InvalidRequest(f"the grammar cannot be read on line {line} at {text[position : position + 20]!r}")
        kind, token = match.lastgroup, match.group()
        position = match.end()
        if kind == "newline":
            line += 1
        elif kind == "rule":
            _close(current)
            if token in rules:
                raise InvalidRequest(f"the grammar defines the rule {token!r} twice, again on line {line}")
            current = rules[token] = _Rule(line)
        elif kind not in ("skip", "define"):
            if current is None:
                raise InvalidRequest(f"the grammar's line {line} comes before any rule; write name ::= ...")
            _add(current, kind or "", token, line)
    _close(current)
    return rules


def _add(rule: _Rule, kind: str, token: str, line: int) -> None:
    """Append one token to a rule."""
    if kind == "repeat":
        if not rule.can_repeat:
            raise InvalidRequest(f"the grammar's line {line} has {token!r} with nothing before it to repeat")
        # A repetition belongs to the piece before it, without a space.
        last = rule.pieces.pop()
        rule.pieces += [last, token.replace(" ", "")] if isinstance(last, tuple) else [last + token.replace(" ", "")]
    elif kind == "name":
        rule.pieces.append((token,))
    elif kind == "class":
        rule.pieces.append(f"/{_class(token)}/")
    elif kind == "string":
        rule.pieces.append(_string(token, line))
    elif kind == "any":
        rule.pieces.append("/(.|\\n)/")
    else:
        rule.depth += {"(": 1, ")": -1}.get(token, 0)
        if rule.depth < 0:
            raise InvalidRequest(f"the grammar's line {line} closes a bracket that is not open")
        rule.pieces.append(token)
    rule.can_repeat = kind not in ("repeat", "other") or token == ")"


def _string(token: str, line: int) -> str:
    """Give a quoted text as Lark writes it: as JSON does."""
    chars: list[str] = []
    for char in _CHAR.findall(token[1:-1]):
        if char[0] == "\\" and len(char) > 2:
            code = int(char[2:], 16)
            if code > sys.maxunicode or 0xD800 <= code <= 0xDFFF:
                raise InvalidRequest(f"the grammar's line {line} has {char}, which is no character")
            chars.append(chr(code))
        elif char[0] == "\\":
            if char[1] not in _ESCAPES:
                raise InvalidRequest(f"the grammar's line {line} has the unknown escape {char}")
            chars.append(_ESCAPES[char[1]])
        else:
            chars.append(char)
    return json.dumps("".join(chars))


def _class(token: str) -> str:
    """Give a character class as regular expressions write it: there more signs have a meaning."""
    is_negated = token.startswith("[^") and len(token) > 3
    chars = [f"\\{char}" if char in _CLASS_SIGNS else char for char in _CHAR.findall(token[1 + is_negated : -1])]
    parts: list[str] = []
    while chars:
        is_range = len(chars) > 2 and chars[1] == "\\-"
        parts.append(f"{chars[0]}-{chars[2]}" if is_range else chars[0])
        del chars[: 3 if is_range else 1]
    return f"[{'^' * is_negated}{''.join(parts)}]"


def _close(rule: _Rule | None) -> None:
    if rule is None:
        return
    if rule.depth:
        raise InvalidRequest(f"the grammar's rule on line {rule.line} leaves a bracket open")
    if not rule.pieces:
        raise InvalidRequest(f"the grammar's rule on line {rule.line} is empty")


def _find_terminals(rules: dict[str, _Rule]) -> set[str]:
    """Give the rules that one regular expression could replace: they use nothing but such rules, and not themselves.

    The lexer sees them whole, which lets longer and shorter texts with the same beginning stand side by side.
    """
    users: dict[str, list[str]] = {}
    num_open: dict[str, int] = {}
    for name, rule in rules.items():
        used = set(rule.names())
        # The root stays a rule, whatever it uses.
        num_open[name] = len(used) + (name == _ROOT)
        for other in used:
            users.setdefault(other, []).append(name)
    terminals: set[str] = set()
    pending = [name for name, count in num_open.items() if count == 0]
    while pending:
        name = pending.pop()
        terminals.add(name)
        for user in users.get(name, ()):
            num_open[user] -= 1
            if num_open[user] == 0:
                pending.append(user)
    return terminals
