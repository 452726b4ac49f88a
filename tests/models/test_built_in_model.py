"""The built-in model's logits against transformers in float64 with the weights as the gguf package reads them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from serve.config import read_environment
from serve.model_store import resolve_model
from serve.models.registry import CausalLM
from tests.checkpoints import load_gguf_reference, reference_logits
from tests.models.harness import PagedRunner, divergence, load


@pytest.fixture(scope="module")
def path(built_in_model: str) -> Path:
    return resolve_model(built_in_model, None, read_environment())


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return load(path)


LENGTHS = (1, 16, 17, 60)
Reference = dict[int, tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    """Random prompts by length, each with transformers' logits in float64."""
    prompts = {n: torch.randint(0, 49152, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS}
    hugging_face = load_gguf_reference(path)
    hugging_face.double()
    return {n: (ids, reference_logits(hugging_face, ids)) for n, ids in prompts.items()}


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_random_tokens_are_those_of_transformers(model: CausalLM, reference: Reference, length: int) -> None:
    """Activations are rounded to 16 bits; bfloat16 weights alone would diverge by 6e-5, a wrong position by 1."""
    ids, exact = reference[length]
    actual = PagedRunner(model, num_blocks=8).prefill(ids)
    assert divergence(exact, actual) < 1e-6
    assert (actual - exact).abs().max() < 0.1
    assert torch.equal(actual[-1].topk(3).indices, exact[-1].topk(3).indices)


def test_a_fact_is_continued(model: CausalLM) -> None:
    # "The capital of France is" -> " Paris"
    assert PagedRunner(model, num_blocks=8).generate([504, 3575, 282, 4649, 314], 1) == [7042]


def test_loading_takes_little_processor_time(path: Path) -> None:
    begin = time.process_time()
    load(path)
    assert time.process_time() - begin < 3.0


def test_loading_takes_little_memory(path: Path) -> None:
    """The blocks of the file, 97 MB, and no float32 copy, which would be 540 MB; at most one layer twice."""
    script = (
        "import resource, sys; from tests.models.harness import load; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; model = load(sys.argv[1]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    # The file's own pages count too while it is read.
    assert int(done.stdout.split()[-1]) < 350 * 1024
