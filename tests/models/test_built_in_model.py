"""The built-in model's logits against transformers in float32 with the weights as the gguf package reads them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from serve.config import read_environment
from serve.model_store import resolve_model
from serve.models.registry import CausalLM
from tests.checkpoints import load_gguf_reference, reference_logits
from tests.models.harness import PagedRunner, load


@pytest.fixture(scope="module")
def path(built_in_model: str) -> Path:
    return resolve_model(built_in_model, None, read_environment())


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return load(path)


LENGTHS = (1, 16, 17, 60)
Reference = dict[int, tuple[list[int], torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    """Random prompts by length, each with transformers' logits in float32 and in float64."""
    prompts = {n: torch.randint(0, 49152, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS}
    hugging_face = load_gguf_reference(path)
    narrow = {n: reference_logits(hugging_face, ids) for n, ids in prompts.items()}
    hugging_face.double()
    return {n: (ids, narrow[n], reference_logits(hugging_face, ids)) for n, ids in prompts.items()}


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_random_tokens_are_as_exact_as_transformers(
    model: CausalLM, reference: Reference, length: int
) -> None:
    ids, narrow, exact = reference[length]
    actual = PagedRunner(model, num_blocks=8).prefill(ids)
    assert (actual - exact).abs().max() <= 2 * (narrow - exact).abs().max() + 1e-4
    assert torch.equal(actual[-1].topk(3).indices, exact[-1].topk(3).indices)


def test_a_fact_is_continued(model: CausalLM) -> None:
    # "The capital of France is" -> " Paris"
    assert PagedRunner(model, num_blocks=8).generate([504, 3575, 282, 4649, 314], 1) == [7042]


def test_loading_takes_little_processor_time(path: Path) -> None:
    begin = time.process_time()
    load(path)
    assert time.process_time() - begin < 3.0
