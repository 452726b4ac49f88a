"""Grammars in EBNF as GBNF files write it (name ::= ..., character classes in brackets), turned into Lark."""

from __future__ import annotations

import re
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
        rule.pieces.append("/" + token.replace("/", "\\/") + "/")
    elif kind == "any":
        rule.pieces.append("/(.|\\n)/")
    else:
        rule.depth += {"(": 1, ")": -1}.get(token, 0)
        if rule.depth < 0:
            raise InvalidRequest(f"the grammar's line {line} closes a bracket that is not open")
        rule.pieces.append(token)
    rule.can_repeat = kind not in ("repeat", "other") or token == ")"


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
    terminals: set[str] = set()
    while True:
        more = {
            name
            for name, rule in rules.items()
            if name != _ROOT and name not in terminals and all(used in terminals for used in rule.names())
        }
        if not more:
            return terminals
        terminals |= more
