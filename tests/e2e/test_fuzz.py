"""Schemathesis against the server's own description: no 5xx, and every answer as described.

A short run here; `make test-fuzz` sets SERVE_FUZZ_EXAMPLES, the number of bodies made for each route, and adds
thousands of bodies that take each field to its edges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fuzz_hooks import MODEL_VARIABLE
from tests.e2e.server import Server, running
from tests.source_tree import ROOT, TESTS

EXAMPLES = int(os.environ.get("SERVE_FUZZ_EXAMPLES", "10"))
LONG_RUN = 50
IS_LONG = EXAMPLES >= LONG_RUN
LEAST_CASES = 2000 if IS_LONG else 150
# Answers 200 that a route gets at least in a run that takes fields to their edges: refusals alone would show little.
LEAST_ANSWERS = 4
ALL_PHASES = "coverage,fuzzing"
LIMIT_S = 120 + 20 * EXAMPLES
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize")
# A model that generates refuses these; the short run asks pooling models only.
POOLING = (
    "/v1/embeddings",
    "/pooling",
    "/classify",
    *(f"{v}/{path}" for path in ("score", "rerank") for v in ("", "/v1")),
)


@pytest.fixture(scope="module")
def small_server(tiny_model: Path) -> Iterator[Server]:
    """The seeded random model with a short context, so that no answer is long."""
    flags = ("--served-model-name", "small", "--kv-cache-memory", "64MiB", "--max-model-len", "128")
    with running(*flags, model=str(tiny_model)) as server:
        yield server


def fuzz(server: Server, model: str, folder: Path, *options: str, phases: str) -> dict[str, object]:
    """Run Schemathesis against a server and give its summary; fail with its findings."""
    report = folder / "report.json"
    command = [
        *(str(Path(sys.executable).with_name("st")), "--config-file", str(TESTS / "e2e" / "schemathesis.toml"), "run"),
        *(f"{server.base_url}/openapi.json", "--checks", "all"),
        *("--phases", phases),
        *("--max-examples", str(EXAMPLES), "--continue-on-failure", "--no-shrink", "--no-color"),
        *(() if IS_LONG else ("--seed", "1")),
        *("--report", "json", "--report-json-path", str(report), *options),
    ]
    names = {"SCHEMATHESIS_HOOKS": "tests.e2e.fuzz_hooks", MODEL_VARIABLE: model, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **names}, capture_output=True, text=True)
    failures = done.stdout[done.stdout.find("= FAILURES") :][:20_000]
    assert done.returncode == 0, f"{failures}\n{done.stderr[-2000:]}"
    assert server.status("/health") == 200
    return dict(json.loads(report.read_text()))


def num_answers(server: Server, path: str) -> float:
    """Count the answers 200 of a route."""
    found = server.samples("http_requests_total")
    return sum(value for labels, value in found if labels["status"] == "200" and path in labels.values())


@pytest.mark.timeout(LIMIT_S)
def test_every_answer_is_as_described(small_server: Server, tmp_path: Path) -> None:
    others = () if IS_LONG else [option for path in POOLING for option in ("--exclude-path", path)]
    summary = fuzz(small_server, "small", tmp_path, *others, phases=ALL_PHASES if IS_LONG else "fuzzing")
    operations, cases = summary["operations"], summary["test_cases"]
    assert isinstance(operations, dict)
    assert isinstance(cases, dict)
    assert operations["tested"] == operations["selected"] > 0
    assert cases["generated"] >= LEAST_CASES
    few = {path: count for path in GENERATING if (count := num_answers(small_server, path)) < LEAST_ANSWERS}
    assert not few or not IS_LONG


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("fixture", "model", "paths"),
    [
        ("decoder_embeddings", "decoder", ("/v1/embeddings", "/pooling")),
        ("cross_encoder", "pairs", ("/classify", "/score", "/rerank")),
    ],
)
def test_every_answer_of_a_pooling_model_is_as_described(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, model: str, paths: tuple[str, ...]
) -> None:
    server: Server = request.getfixturevalue(fixture)
    fuzz(
        server,
        model,
        tmp_path,
        *(option for path in paths for option in ("--include-path", path)),
        phases=ALL_PHASES if IS_LONG else "coverage",
    )
    few = {path: count for path in paths if (count := num_answers(server, path)) < LEAST_ANSWERS}
    assert not few
