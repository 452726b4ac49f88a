"""Hundreds of random mixes: a request's logits are the same to the bit alone and in any company.

A mix runs several requests side by side, their prompts cut at random, some decoding while others prefill, some thrown
out half-way and computed again, on one to three threads and with every type of cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch

from serve.kernels import ops
from serve.models.registry import CausalLM
from tests.checkpoints import VOCAB_SIZE, write_checkpoint, write_gguf
from tests.models.harness import PagedRunner, load

NUM_MIXES = 40
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "intermediate_size": 128}
CACHE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
MODELS = ("llama", "qwen2", "qwen3", "mistral", "llama in Q4_1", "qwen3 in Q8_0", "llama in bfloat16")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    """A tiny model of a family, its weights plain, quantised or of two bytes."""
    family, _, kind = request.param.partition(" in ")
    if kind.startswith("Q"):
        write_gguf(tmp_path / "m.gguf", family, kind=gguf.GGMLQuantizationType[kind], **SIZES)
        return load(tmp_path / "m.gguf")
    dtype = torch.bfloat16 if kind else torch.float32
    changes = {"sliding_window": 24} if family == "mistral" else {}
    return load(write_checkpoint(tmp_path, family, dtype=dtype, **changes))


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    ops.set_num_threads(1)


def run_mix(model: CausalLM, prompts: list[list[int]], dtype: torch.dtype, choose: random.Random) -> list[torch.Tensor]:
    """Give the logits of every token of every prompt, computed in a random mix of steps."""
    runner = PagedRunner(model, dtype=dtype)
    names = [f"{i}" for i in range(len(prompts))]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    left = dict(zip(names, (list(prompt) for prompt in prompts), strict=True))
    generation = dict.fromkeys(names, 0)
    while any(left.values()):
        ops.set_num_threads(choose.randint(1, 3))
        waiting = [name for name in names if left[name]]
        chosen = choose.sample(waiting, choose.randint(1, len(waiting)))
        sizes = {name: choose.choice((1, 1, choose.randint(1, len(left[name])))) for name in chosen}
        logits = runner.step({f"{name}.{generation[name]}": left[name][: sizes[name]] for name in chosen})
        for name in chosen:
            parts[name].append(logits[f"{name}.{generation[name]}"])
            left[name] = left[name][sizes[name] :]
        if choose.random() < 0.1:
            preempted = choose.choice(chosen)
            generation[preempted] += 1
            parts[preempted] = []
            left[preempted] = list(prompts[names.index(preempted)])
    return [torch.cat(parts[name]) for name in names]


def test_logits_are_the_same_to_the_bit_alone_and_in_any_mix(model: CausalLM) -> None:
    choose = random.Random(7)
    prompts = [[choose.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 9, 16, 17, 40, 63)]
    for dtype in CACHE_TYPES:
        ops.set_num_threads(1)
        alone = [PagedRunner(model, dtype=dtype).prefill(prompt) for prompt in prompts]
        for number in range(NUM_MIXES // len(CACHE_TYPES)):
            picked = choose.sample(range(len(prompts)), choose.randint(2, 5))
            mixed = run_mix(model, [prompts[i] for i in picked], dtype, choose)
            for i, logits in zip(picked, mixed, strict=True):
                assert torch.equal(logits, alone[i]), f"mix {number}, prompt {i}, {dtype}"
