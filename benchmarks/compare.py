"""Compares OpenAI-compatible servers on one machine: the same requests, in turns, round by round.

    python -m benchmarks.compare --server ours=http://127.0.0.1:8000,smollm2-135m-instruct \
        --server llama.cpp=http://127.0.0.1:8101,any --json out.json --markdown out.md --png out.png

Every round sends one workload at one concurrency to each server in turn, so that a drift of the machine's speed meets
all of them; the first round warms up and is not counted. Figures are medians over the rounds. benchmarks/compare.md
says how to start the peers. The picture needs matplotlib (pip install matplotlib), nothing else does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_load import WORKLOADS, plan, run_round

FIGURES = ("tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
# The figure that a workload is about.
HEADLINES = {
    "decode": "tokens_per_s",
    "chat": "tokens_per_s",
    "prefill": "ttft_p50_ms",
    "prefix": "ttft_p50_ms",
    "tiny": "requests_per_s",
}


@dataclass(frozen=True)
class Server:
    """A server under comparison."""

    name: str
    url: str
    model: str


@dataclass
class Row:
    """The figures of one server in one workload at one concurrency; rounds holds them round by round."""

    workload: str
    concurrency: int
    server: str
    rounds: list[dict[str, float]]

    def median(self, figure: str) -> float:
        """Give the median of a figure over the rounds."""
        return statistics.median(round_[figure] for round_ in self.rounds)

    @property
    def num_errors(self) -> int:
        """Requests of all rounds that did not end well."""
        return int(sum(round_["errors"] for round_ in self.rounds))


def parse_server(text: str) -> Server:
    """Read NAME=URL,MODEL."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition(",")
    if not (name and url.startswith("http://") and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT,MODEL")
    return Server(name, url, model)


def compare(servers: Sequence[Server], workload: str, concurrency: int, num_rounds: int) -> list[Row]:
    """Give one row a server."""
    rows = [Row(workload, concurrency, server.name, []) for server in servers]
    for number in range(num_rounds + 1):
        # Who goes first changes from round to round.
        order = [(number + i) % len(servers) for i in range(len(servers))]
        for index in order:
            streams = plan(WORKLOADS[workload], servers[index].model, concurrency, seed=1000 * number + concurrency)
            figures = run_round(servers[index].url, streams)
            if number:
                rows[index].rounds.append(figures)
    return rows


def to_markdown(rows: Sequence[Row], about: str) -> str:
    """Give a table of all rows; ratio compares the workload's own figure with the best other server's."""
    lines = [about, "", "| workload | streams | server | " + " | ".join(FIGURES) + " | errors | ratio |"]
    lines.append("|" + " --- |" * (len(FIGURES) + 5))
    for row in rows:
        cells = [f"{row.median(figure):,.1f}" for figure in FIGURES]
        lines.append(
            f"| {row.workload} | {row.concurrency} | {row.server} | {' | '.join(cells)} | {row.num_errors} | "
            f"{ratio_to_best_other(row, rows)} |"
        )
    return "\n".join(lines) + "\n"


def ratio_to_best_other(row: Row, rows: Sequence[Row]) -> str:
    """Give how a row's headline figure stands to the best of the other servers, round by round, as a median."""
    figure = HEADLINES[row.workload]
    others = [
        other
        for other in rows
        if (other.workload, other.concurrency) == (row.workload, row.concurrency) and other is not row
    ]
    if not others:
        return ""
    pick = min if figure.endswith("_ms") else max
    best = pick(others, key=lambda other: other.median(figure))
    pairs = zip(row.rounds, best.rounds, strict=True)
    ratios = [own[figure] / other[figure] for own, other in pairs if other[figure]]
    return f"{statistics.median(ratios):.2f} {figure}" if ratios else ""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw one panel a workload: its own figure over the number of streams, a bar a server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row.workload for row in rows))
    servers = list(dict.fromkeys(row.server for row in rows))
    figure, panels = pyplot.subplots(1, len(workloads), figsize=(4 * len(workloads), 3.6), squeeze=False)
    for panel, workload in zip(panels[0], workloads, strict=True):
        own = [row for row in rows if row.workload == workload]
        streams = list(dict.fromkeys(row.concurrency for row in own))
        for place, server in enumerate(servers):
            heights = [row.median(HEADLINES[workload]) for row in own if row.server == server]
            width = 0.8 / len(servers)
            panel.bar([i + place * width for i in range(len(streams))], heights, width, label=server)
        panel.set_xticks([i + 0.4 - 0.4 / len(servers) for i in range(len(streams))], [str(n) for n in streams])
        better = "lower" if HEADLINES[workload].endswith("_ms") else "higher"
        panel.set(title=workload, xlabel="streams", ylabel=f"{HEADLINES[workload]} ({better} is better)")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run all pairs of workload and concurrency, and write what was asked for; 1 when a request failed."""
    parser = argparse.ArgumentParser(description="Compares OpenAI-compatible servers on one machine.")
    parser.add_argument("--server", action="append", type=parse_server, required=True, metavar="NAME=URL,MODEL")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    for workload in arguments.workloads.split(","):
        for concurrency in map(int, arguments.concurrency.split(",")):
            made = compare(arguments.server, workload, concurrency, arguments.rounds)
            for row in made:
                text = "  ".join(f"{figure}={row.median(figure):.1f}" for figure in FIGURES)
                print(f"{workload:8} c={concurrency:<3} {row.server:12} {text}  errors={row.num_errors}", flush=True)
            rows += made
    about = f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    if arguments.markdown:
        arguments.markdown.write_text(to_markdown(rows, about))
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "rows": [vars(row) for row in rows]}, indent=1))
    if arguments.png:
        draw(rows, arguments.png)
    return 1 if any(row.num_errors for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
