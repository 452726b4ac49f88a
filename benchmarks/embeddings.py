"""Measures texts a second of the real embedding model: through the server, and by transformers in this process.

    .venv/bin/python benchmarks/embeddings.py [--texts 512] [--words 24] [--batch 64] [--clients 2] [--runs 3]

Seeded texts of about that many words are sent in batches by that many clients at once. transformers computes the same
texts in padded batches, sorted by length, on as many threads as the machine has. One run of each is not counted.
Prints one JSON line: texts and tokens a second of each run and their medians, the largest difference of the vectors,
machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers

MODEL = "all-minilm-l6-v2"
LIMIT_S = 120.0
POLL_S = 0.05
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"),
    *("his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they"),
)


def make_texts(count: int, num_words: int) -> list[str]:
    """Give seeded texts of half to one and a half times that many words."""
    rng = random.Random(0)
    lengths = (rng.randint(max(1, num_words // 2), num_words * 3 // 2) for _ in range(count))
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    """Start a server with the model and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "serve", MODEL, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    while time.monotonic() - begin < LIMIT_S and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except (urllib.error.URLError, ConnectionError):
            time.sleep(POLL_S)
    process.kill()
    raise SystemExit("the server did not become ready")


def embed(url: str, texts: list[str]) -> tuple[np.ndarray, int]:
    """Send one request; give its vectors and the number of its tokens."""
    body = json.dumps({"input": texts, "model": MODEL}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        reply = json.load(answer)
    return np.array([item["embedding"] for item in reply["data"]], dtype=np.float32), reply["usage"]["prompt_tokens"]


def by_server(url: str, texts: list[str], batch: int, clients: int) -> tuple[np.ndarray, int]:
    """Embed all texts through the server."""
    parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda part: embed(url, part), parts))
    return np.concatenate([vectors for vectors, _ in answers]), sum(tokens for _, tokens in answers)


@torch.inference_mode()
def by_transformers(folder: Path, texts: list[str], batch: int) -> Callable[[], np.ndarray]:
    """Give a function that embeds all texts with transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def run() -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[np.ndarray | None] = [None] * len(texts)
        for start in range(0, len(texts), batch):
            part = order[start : start + batch]
            inputs = tokenizer([texts[i] for i in part], return_tensors="pt", padding=True, truncation=False)
            rows = model(**inputs).last_hidden_state
            mask = inputs.attention_mask.unsqueeze(-1)
            means = torch.nn.functional.normalize((rows * mask).sum(dim=1) / mask.sum(dim=1))
            for index, vector in zip(part, means.numpy(), strict=True):
                vectors[index] = vector
        return np.stack([vector for vector in vectors if vector is not None])

    return run


def timed(work: Callable[[], np.ndarray], runs: int) -> tuple[list[float], np.ndarray]:
    """Run once uncounted, then runs times; give the seconds of each and the last result."""
    work()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return seconds, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("texts", 512), ("words", 24), ("batch", 64), ("clients", 2), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parsed = parser.parse_args()
    if parsed.runs < 3:
        parser.error("--runs must be at least 3")
    texts = make_texts(parsed.texts, parsed.words)
    pulled = subprocess.run([sys.executable, "-m", "serve", "pull", MODEL], capture_output=True, text=True, check=True)
    folder = Path(pulled.stdout.strip().splitlines()[-1])
    process, url = start_server()
    try:
        _, num_tokens = by_server(url, texts, parsed.batch, parsed.clients)
        served_s, served = timed(lambda: by_server(url, texts, parsed.batch, parsed.clients)[0], parsed.runs)
    finally:
        process.terminate()
        process.wait()
    rival_s, rival = timed(by_transformers(folder, texts, parsed.batch), parsed.runs)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    report = {
        "benchmark": "embeddings",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "model": MODEL,
        "settings": vars(parsed),
        "tokens": num_tokens,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": os.getloadavg()[0],
        "serve_texts_per_s": [round(len(texts) / s, 1) for s in served_s],
        "transformers_texts_per_s": [round(len(texts) / s, 1) for s in rival_s],
        "serve_median_texts_per_s": round(len(texts) / statistics.median(served_s), 1),
        "serve_median_tokens_per_s": round(num_tokens / statistics.median(served_s)),
        "transformers_median_texts_per_s": round(len(texts) / statistics.median(rival_s), 1),
        "largest_difference": float(np.abs(served - rival).max()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
