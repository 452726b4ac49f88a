"""The requests of the lm-eval harness (local-completions, log-likelihood), answered as transformers would.

`make test-clients` runs the harness itself over the same questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import post
from tests.e2e.server import Server
from tests.loglikelihood import candidates, reference

TOLERANCE = 1e-3


def read_choice(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Read one answer as the harness does: the prompt's values after the question, without the generated token."""
    values = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_equal_transformers(tiny: Server, tiny_model: Path, batch_size: int) -> None:
    asked = candidates(tiny_model)
    found: list[tuple[float, bool]] = []
    for start in range(0, len(asked), batch_size):
        batch = asked[start : start + batch_size]
        body = {
            "model": "tiny",
            "prompt": [candidate.token_ids for candidate in batch],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = post(tiny, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        found += [read_choice(choice, each.num_context) for choice, each in zip(choices, batch, strict=True)]
    expected = reference(tiny_model)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=TOLERANCE)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
