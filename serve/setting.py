"""The field of a settings dataclass: a default, and what its command-line flag needs to know."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar, cast

_T = TypeVar("_T")


def flag(
    default: _T,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    alias: str | None = None,
    positional: bool = False,
    kind: str = "plain",
) -> _T:
    """Describe one setting and give its dataclass field.

    kind: plain, count (accepts 8k, 1M), bytes (accepts 2GiB), json, list or secret.
    """
    meta = {"help": help_text, "choices": choices, "alias": alias, "positional": positional, "kind": kind}
    # The dataclass machinery sees the Field; type checkers see the default's own type, as with dataclasses.field.
    if isinstance(default, dict):
        return cast(_T, field(default_factory=lambda: dict(default), metadata=meta))
    return field(default=default, metadata=meta)
