"""Gaps between the tokens of running streams while long prompts arrive, and what the prompts take.

    python -m benchmarks.long_prompts --url http://127.0.0.1:8000 [--streams 8] [--words 4000] [--seconds 20]

Streams decode all the time; now and then a prompt of --words words arrives, all different, one at a time with
--pause seconds between. Prints a JSON line: the gaps of the streams in milliseconds (p50, p99 and their ratio, with
and without a prompt in the server), and the seconds to the first token of a prompt, beside the streams and alone.
The goal is a ratio of at most 3 over the whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time

import uvloop

from benchmarks.http_load import WORDS, Answer, complete, percentile_ms


def body(model: str, num_words: int, num_tokens: int, rng: random.Random) -> dict[str, object]:
    """Give a request with a prompt like no other."""
    prompt = " ".join(rng.choices(WORDS, k=num_words))
    return {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Give the figures of one run."""
    rng = random.Random(arguments.seed)
    url, model = arguments.url, arguments.model
    alone = [await complete(url, body(model, arguments.words, 1, rng)) for _ in range(2)]
    end = time.perf_counter() + arguments.seconds
    decoded: list[Answer] = []

    async def decode(stream_rng: random.Random) -> None:
        while time.perf_counter() < end:
            decoded.append(await complete(url, body(model, 16, 100, stream_rng)))

    streams = [asyncio.ensure_future(decode(random.Random(arguments.seed + i + 1))) for i in range(arguments.streams)]
    prompts: list[Answer] = []
    await asyncio.sleep(arguments.pause)
    while time.perf_counter() < end:
        prompts.append(await complete(url, body(model, arguments.words, 1, rng)))
        await asyncio.sleep(arguments.pause)
    await asyncio.gather(*streams)
    errors = [answer.error for answer in (*alone, *decoded, *prompts) if answer.error]
    assert not errors, errors[0]
    busy = [(answer.start, answer.times[0]) for answer in prompts]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for answer in decoded:
        for before, after in zip(answer.times, answer.times[1:], strict=False):
            gaps[any(start < after and before < stop for start, stop in busy)].append(after - before)
    everything = sorted(gaps[True] + gaps[False])
    return {
        "benchmark": "long_prompts",
        "streams": arguments.streams,
        "words": arguments.words,
        "prompts": len(prompts),
        "all": spread(everything),
        "with_prompt": spread(sorted(gaps[True])),
        "without_prompt": spread(sorted(gaps[False])),
        "prompt_seconds": round(statistics.median(answer.first for answer in prompts), 2),
        "prompt_seconds_alone": round(min(answer.first for answer in alone), 2),
        "tokens_per_s": round(sum(answer.num_tokens for answer in decoded) / arguments.seconds, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def spread(gaps: list[float]) -> dict[str, float]:
    """Give p50, p99 and p99 / p50."""
    p50, p99 = percentile_ms(gaps, 0.5), percentile_ms(gaps, 0.99)
    return {"p50_ms": p50, "p99_ms": p99, "ratio": round(p99 / p50, 2)}


def main() -> None:
    """Run once and print one JSON line."""
    parser = argparse.ArgumentParser(description="Gaps between tokens while long prompts arrive.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
