"""Cost of a streamed chat token from hand-over to bytes: turn, parser, chunk and ASGI, without detokenizer and socket.

    python -m benchmarks.chat_stream [CASE ...]

One request after the other, each of NUM_TOKENS hand-overs of a few characters, through the whole HTTP application.
Prints a JSON line: CPU microseconds a token, median and spread of the runs. Add what benchmarks/output_processor.py
reports for the text itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import statistics
import sys
import time

from serve.engine.outputs import CompletionOutput, RequestOutput
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason
from tests.unit.entrypoints.app_client import App, make_app

NUM_TOKENS = 2000
NUM_RUNS = 7
WORDS = "The quick brown fox jumps over the lazy dog and then it sleeps until the sun comes up again. "
VALUE = WORDS.replace('"', "")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

TEXTS = {
    "plain": WORDS * 200,
    "structured_output": "[" + ", ".join(['{"key": "value", "n": 12}'] * 400),
    "reasoning": "<think>" + WORDS * 200,
    "tools_unused": WORDS * 200,
    "tools_called": '<tool_call>{"name": "f", "arguments": {"text": "' + VALUE * 200,
    "tools_required": '[{"name": "f", "parameters": {"text": "' + VALUE * 200,
}
BODIES: dict[str, dict[str, object]] = {
    "plain": {},
    "structured_output": {"response_format": {"type": "json_object"}},
    "reasoning": {},
    "tools_unused": {"tools": [TOOL]},
    "tools_called": {"tools": [TOOL]},
    "tools_required": {"tools": [TOOL], "tool_choice": "required"},
}
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "structured_output": {},
    "reasoning": {"reasoning_parser": "qwen3"},
    "tools_unused": {"tool_call_parser": "hermes"},
    "tools_called": {"tool_call_parser": "hermes"},
    "tools_required": {"tool_call_parser": "hermes"},
}


def hand_overs(text: str) -> list[RequestOutput]:
    """Cut a text into pieces of four characters, one token each."""
    steps = []
    for i in range(NUM_TOKENS):
        finish = FinishReason.LENGTH if i == NUM_TOKENS - 1 else None
        output = CompletionOutput(0, text[4 * i : 4 * i + 4], [97], None, finish)
        steps.append(RequestOutput("id", [], [output], finished=finish is not None))
    return steps


async def run_once(app: App, body: dict[str, object]) -> float:
    """Give CPU microseconds a token of one stream."""
    gc.collect()
    start = time.process_time()
    reply = await app.post("/v1/chat/completions", body)
    seconds = time.process_time() - start
    assert reply.status == 200, reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")
    return seconds / NUM_TOKENS * 1e6


async def measure(case: str) -> dict[str, float]:
    """Run one case."""
    template = "{% if tools %}{{ tools | length }}{% endif %}{{ messages[0].content }}"
    steps: list[RequestOutput] = []

    def script(params: SamplingParams) -> list[RequestOutput]:
        return steps.copy()

    app = make_app(script, template=template, **SETTINGS[case])
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 64, **BODIES[case]}
    times = []
    for _ in range(NUM_RUNS + 1):
        steps[:] = hand_overs(TEXTS[case])
        times.append(await run_once(app, body))
    return {"us": round(statistics.median(times[1:]), 2), "spread": round(max(times[1:]) - min(times[1:]), 2)}


def main() -> None:
    """Run the cases and print one JSON line."""
    names = sys.argv[1:] or list(TEXTS)
    results = {name: asyncio.run(measure(name)) for name in names}
    print(json.dumps({"benchmark": "chat_stream", "python": platform.python_version(), "per_token": results}))


if __name__ == "__main__":
    main()
