"""Thirty conversations as clients send them, for rendering with the chat templates of real model families."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat request. plain_roles is the same chat for templates that do not know the role developer."""

    messages: list[Message]
    tools: list[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Message = field(default_factory=dict)
    documents: list[Message] | None = None
    plain_roles: list[Message] | None = None


def user(content: object) -> Message:
    return {"role": "user", "content": content}


def system(content: object) -> Message:
    return {"role": "system", "content": content}


def developer(content: object) -> Message:
    return {"role": "developer", "content": content}


def assistant(content: object, **fields: object) -> Message:
    return {"role": "assistant", "content": content, **fields}


def calls(*named: tuple[str, str]) -> list[Message]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)
    ]


def tool(content: object, number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


WEATHER: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter f\u00fcr <b>St\u00e4dte</b> & \u6771\u4eac",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": 'Name of the "city"'},
                "days": {"type": "integer", "default": 3},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
            "required": ["city"],
        },
    },
}
CLOCK: Message = {
    "type": "function",
    "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
SEARCH: Message = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "array", "items": {"type": "string"}},
                "limit": {"oneOf": [{"type": "integer"}, {"type": "string", "description": "all"}]},
                "where": {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]},
            },
        },
    },
}
BERN = ("get_weather", '{"city":  "Bern", "days": 2}')
ZURICH = ("get_weather", '{"city": "Z\u00fcrich", "deep": {"a": [1, null, true]}}')
ASK, FOLLOW = user("What is 2 < 3 && \u4f60\u597d?"), user("And then?")
ODD_TEXT = "  \u00e9\u0301 \u202e\U0001f642\u200d\U0001f525 \ttab\r\nnext \u3000<|im_end|> <eos> {{ x }} {% if %}  "

CONVERSATIONS = {
    "one user turn": Conversation([ASK]),
    "system and user": Conversation([system("Be brief. "), ASK]),
    "three turns": Conversation([ASK, assistant("It is true."), FOLLOW]),
    "long history": Conversation(
        [system("S"), ASK, assistant("A"), FOLLOW, assistant("B"), ASK, assistant("C"), FOLLOW]
    ),
    "no generation prompt": Conversation([ASK, assistant("It is true.")], add_generation_prompt=False),
    "user last without generation prompt": Conversation([system("S"), ASK], add_generation_prompt=False),
    "continued answer": Conversation(
        [ASK, assistant("It is tr")], add_generation_prompt=False, continue_final_message=True
    ),
    "continued answer that ends in blanks": Conversation(
        [ASK, assistant("First: \n ")], add_generation_prompt=False, continue_final_message=True
    ),
    "continued user turn": Conversation([user("Once upon")], add_generation_prompt=False, continue_final_message=True),
    "empty user text": Conversation([user("")]),
    "empty system text": Conversation([system(""), ASK]),
    "empty answer": Conversation([ASK, assistant(""), FOLLOW]),
    "odd characters": Conversation([system(ODD_TEXT), user(ODD_TEXT), assistant(ODD_TEXT), user(ODD_TEXT)]),
    "content parts": Conversation([user(parts("  one ", "two"))]),
    "content parts in every role": Conversation(
        [system(parts("S1", "S2")), user(parts("U")), assistant(parts("A")), ASK]
    ),
    "developer": Conversation([developer("Obey."), ASK], plain_roles=[system("Obey."), ASK]),
    "developer after system": Conversation(
        [system("First."), ASK, developer("Second.")], plain_roles=[system("First.\n\nSecond."), ASK]
    ),
    "late system": Conversation([ASK, assistant("Yes."), system("Now in verse."), FOLLOW]),
    "tools": Conversation([ASK], tools=[WEATHER, CLOCK]),
    "tools and system": Conversation([system("Be brief."), ASK], tools=[SEARCH]),
    "tool round": Conversation([ASK, assistant(None, tool_calls=calls(BERN)), tool("4 \u00b0C")], tools=[WEATHER]),
    "parallel calls": Conversation(
        [ASK, assistant(None, tool_calls=calls(BERN, ZURICH)), tool("4"), tool(parts("5", "6"), 1)], tools=[WEATHER]
    ),
    "tool rounds in a chat": Conversation(
        [
            *(ASK, assistant("Let me see.", tool_calls=calls(BERN)), tool('{"t": 4}'), assistant("4 degrees.")),
            *(FOLLOW, assistant("", tool_calls=calls(("now", ""))), tool("noon")),
        ],
        tools=[WEATHER, CLOCK],
    ),
    "call that ends the history": Conversation(
        [ASK, assistant(None, tool_calls=calls(ZURICH))], tools=[WEATHER], add_generation_prompt=False
    ),
    "thinking off": Conversation([ASK], kwargs={"enable_thinking": False}),
    "thinking on": Conversation([ASK], kwargs={"enable_thinking": True, "reasoning_effort": "high"}),
    "reasoning in the history": Conversation([ASK, assistant("Yes.", reasoning_content="2 is less.\n"), FOLLOW]),
    "reasoning before a call": Conversation(
        [ASK, assistant("", reasoning_content="Look it up.", tool_calls=calls(BERN)), tool("4")], tools=[WEATHER]
    ),
    "thinking tags in an answer": Conversation([ASK, assistant("<think>\nhm\n</think>\n\nYes."), FOLLOW]),
    "documents and a date": Conversation(
        [ASK],
        documents=[{"title": "T", "text": "D"}],
        kwargs={"date_string": "30 Nov 2026", "builtin_tools": ["python"]},
    ),
}
