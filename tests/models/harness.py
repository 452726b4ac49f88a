"""Runs a model over a paged cache without the engine: requests side by side, prompts whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from serve.checkpoint import load_checkpoint
from serve.config import ModelConfig
from serve.kernels.attention import AttentionMetadata, KVCache, select_backend
from serve.models.registry import CausalLM, load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


@dataclass
class PagedRequest:
    """One request: its blocks in order and how many of its tokens are in the cache."""

    block_ids: list[int]
    num_computed_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)


class PagedRunner:
    """A model with its caches. Blocks of neighbouring requests interleave, so that paging matters."""

    def __init__(self, model: CausalLM, *, dtype: torch.dtype = torch.float32, num_blocks: int = 256) -> None:
        backend = select_backend(CPU)
        self.model = model
        self._caches: list[KVCache] = [
            backend.allocate_kv_cache(
                num_blocks, BLOCK_SIZE, num_kv_heads=model.num_kv_heads, head_size=model.head_size, dtype=dtype
            )
            for _ in range(model.num_layers)
        ]
        self._free = list(range(num_blocks - 1, 0, -1))
        self._sequences: dict[str, PagedRequest] = {}

    def step(self, batch: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Feed new tokens to each named request; gives hidden-state logits [new tokens, vocab_size] by request."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in batch.items():
            sequence = self._sequences.setdefault(name, PagedRequest([]))
            first = sequence.num_computed_tokens
            last = first + len(tokens)
            while len(sequence.block_ids) * BLOCK_SIZE < last:
                sequence.block_ids.append(self._free.pop())
            ids += tokens
            positions += range(first, last)
            slots += [sequence.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)]
            sequence.num_computed_tokens = last
            starts.append(len(ids))
        sequences = [self._sequences[name] for name in batch]
        width = max(len(s.block_ids) for s in sequences)
        meta = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([s.num_computed_tokens for s in sequences], dtype=torch.int32),
            block_table=torch.tensor(
                [s.block_ids + [0] * (width - len(s.block_ids)) for s in sequences], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            num_reqs=len(sequences),
            num_tokens=len(ids),
            max_query_len=max(len(tokens) for tokens in batch.values()),
            max_seq_len=max(s.num_computed_tokens for s in sequences),
        )
        hidden = self.model.forward(torch.tensor(ids, dtype=torch.int32), torch.tensor(positions), self._caches, meta)
        logits = self.model.compute_logits(hidden)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(batch)}

    def prefill(self, token_ids: Sequence[int], name: str = "r") -> Tensor:
        """Feed a whole prompt in one step: logits [len(token_ids), vocab_size]."""
        return self.step({name: token_ids})[name]

    def generate(self, token_ids: Sequence[int], num_tokens: int, name: str = "g") -> list[int]:
        """Continue a prompt greedily."""
        logits = self.prefill(token_ids, name)
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            logits = self.step({name: output[-1:]})[name]
            output.append(int(logits[-1].argmax()))
        return output


def divergence(exact: Tensor, actual: Tensor) -> float:
    """Give the mean Kullback-Leibler divergence of the distributions that two sets of logits stand for."""
    expected = torch.log_softmax(exact.double(), dim=-1)
    found = torch.log_softmax(actual.double(), dim=-1)
    return float((expected.exp() * (expected - found)).sum(dim=-1).mean())


def load(
    path: str | Path, *, dtype: str = "auto", max_model_len: int | None = None, cpu_activations: str = "exact"
) -> CausalLM:
    """Load a model as the worker does."""
    config = ModelConfig(model=str(path), dtype=dtype, max_model_len=max_model_len, cpu_activations=cpu_activations)
    return load_model(load_checkpoint(path), config, dtype=torch.float32, device=CPU)
