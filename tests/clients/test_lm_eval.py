"""The lm-eval harness against the server, log-likelihoods equal to transformers; `make test-clients` runs it.

SERVE_LM_EVAL names the harness's program. It lives in an environment of its own: it brings 700 MB of packages.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import running
from tests.loglikelihood import QUESTIONS, reference
from tests.source_tree import ROOT

TASK = """\
task: questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
LIMIT_S = 240
TOLERANCE = 1e-3


def write_task(folder: Path) -> None:
    rows = [json.dumps({"question": question, "choices": answers}) for question, answers in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(rows))
    (folder / "questions.yaml").write_text(TASK.format(file=folder / "questions.jsonl"))


def test_loglikelihoods_equal_transformers(tiny_model: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    flags = ("--served-model-name", "tiny", "--kv-cache-memory", "64MiB", "--enable-tokenizer-info-endpoint")
    with running(*flags, model=str(tiny_model)) as server:
        url = f"{server.base_url}/v1/completions"
        command = [
            *(os.environ["SERVE_LM_EVAL"], "--model", "local-completions", "--log_samples"),
            *("--model_args", f"base_url={url},model=tiny,num_concurrent=4,max_retries=1"),
            *("--tasks", "questions", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "unused"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    found = [(float(value), is_greedy == "True") for row in rows for value, is_greedy in row["filtered_resps"]]
    expected = reference(tiny_model)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=TOLERANCE)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
