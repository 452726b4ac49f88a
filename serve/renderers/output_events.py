"""What the text of an answer is made of: thoughts, content and tool calls, as events in the order they are written.

A parser (reasoning.py, tool_parsers/) turns text that arrives in pieces into these events. How the text was cut into
pieces never changes what the events say when pieces of one kind are joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's own text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; index counts the calls of an answer from 0, call_id is unique in the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of the arguments of a call; joined they are one JSON object, unless the answer was cut."""

    index: int
    arguments: str


Event = ContentDelta | ReasoningDelta | CallStart | CallDelta


class OutputParser(Protocol):
    """Reads the text of one answer; one instance an answer, nothing shared."""

    @property
    def is_reasoning(self) -> bool:
        """True while the text that comes next is inside the thoughts."""

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of text and give what became certain."""

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """Give what was held back; was_cut tells that the answer did not end by itself.

        Markup that the end interrupts before it is a call is content, but not in an answer that was cut.
        """
