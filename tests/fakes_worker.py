"""Models and a stand-in scheduler for tests of the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve.kernels.attention import AttentionMetadata, KVCache, select_backend
from serve.models.layers.embedding import PromptEmbeds
from serve.models.registry import CausalLM
from serve.sampling_params import SamplingParams
from serve.wire.step import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from serve.worker.logits_processors import LogitsProcessor, ProcessorChain
from serve.worker.model_runner import ModelRunner, RunnerLimits

CPU = torch.device("cpu")
BLOCK_SIZE = 16


class ScriptedModel:
    """Logits by the last token and its position, from a table: no attention, so any text is as cheap as any other.

    poisoned tokens give rows of NaN.
    """

    def __init__(self, vocab_size: int, *, seed: int = 0, poisoned: Sequence[int] = ()) -> None:
        rng = np.random.default_rng(seed)
        self.table = torch.from_numpy(rng.standard_normal((97, vocab_size)).astype(np.float32) * 3)
        self.poisoned = torch.tensor(list(poisoned), dtype=torch.float64)
        self.num_kv_heads, self.head_size, self.num_layers = 1, 16, 0
        self.num_logits_rows: list[int] = []

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        assert prompt_embeds is None, "the scripted model looks at ids only"
        assert len(input_ids) == meta.num_tokens == len(positions)
        hidden = torch.stack([input_ids.double(), positions.double()], dim=1)
        return hidden if rows is None else hidden[rows]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        self.num_logits_rows.append(len(hidden_states))
        rows = (hidden_states[:, 0] * 31 + hidden_states[:, 1]).long() % 97
        logits = self.table[rows]
        logits[torch.isin(hidden_states[:, 0], self.poisoned)] = float("nan")
        return logits


class TinyAttentionModel:
    """Two layers of real paged attention with random weights, and its own dense float64 answer."""

    def __init__(self, vocab_size: int = 61, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.num_heads, self.num_kv_heads, self.head_size, self.num_layers = 4, 2, 16, 2
        self.hidden_size = 24
        heads, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self._weights = {
            "embed": rng.standard_normal((vocab_size, self.hidden_size)),
            "position": rng.standard_normal((512, self.hidden_size)),
            "query": rng.standard_normal((self.num_layers, self.hidden_size, heads)) * 0.2,
            "key": rng.standard_normal((self.num_layers, self.hidden_size, kv)) * 0.2,
            "value": rng.standard_normal((self.num_layers, self.hidden_size, kv)) * 0.2,
            "out": rng.standard_normal((self.num_layers, heads, self.hidden_size)) * 0.2,
        }
        self._torch = {name: torch.from_numpy(w.astype(np.float32)) for name, w in self._weights.items()}
        self._backend = select_backend(CPU)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        w = self._torch
        hidden = w["embed"][input_ids.long()]
        if prompt_embeds is not None:
            prompt_embeds.write_to(hidden)
        hidden = hidden + w["position"][positions]
        num_tokens = len(hidden)
        for layer in range(self.num_layers):
            query = (hidden @ w["query"][layer]).view(num_tokens, self.num_heads, self.head_size)
            key = (hidden @ w["key"][layer]).view(num_tokens, self.num_kv_heads, self.head_size)
            value = (hidden @ w["value"][layer]).view(num_tokens, self.num_kv_heads, self.head_size)
            self._backend.write_kv(key, value, kv_caches[layer], meta.slot_mapping)
            attended = torch.full_like(query, float("nan"))
            self._backend.attend(query, kv_caches[layer], meta, attended, scale=self.head_size**-0.5)
            hidden = hidden + attended.view(num_tokens, -1) @ w["out"][layer]
        return hidden if rows is None else hidden[rows]

    def embeddings(self) -> NDArray[np.float32]:
        """Give what forward looks up for each id, [vocab_size, hidden_size]."""
        return self._weights["embed"].astype(np.float32)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self._torch["embed"].T

    def dense_logits(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Compute [len(token_ids), vocab_size] in float64, all at once and without a cache."""
        w = self._weights
        num_tokens = len(token_ids)
        hidden = w["embed"][list(token_ids)] + w["position"][:num_tokens]
        causal = np.tril(np.ones((num_tokens, num_tokens), dtype=bool))
        group = self.num_heads // self.num_kv_heads
        for layer in range(self.num_layers):
            query = (hidden @ w["query"][layer]).reshape(num_tokens, self.num_heads, self.head_size)
            key = np.repeat((hidden @ w["key"][layer]).reshape(num_tokens, -1, self.head_size), group, axis=1)
            value = np.repeat((hidden @ w["value"][layer]).reshape(num_tokens, -1, self.head_size), group, axis=1)
            scores = np.einsum("qhd,khd->hqk", query, key) * self.head_size**-0.5
            scores = np.where(causal, scores, -np.inf)
            probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
            probs /= probs.sum(axis=-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", probs, value).reshape(num_tokens, -1)
            hidden = hidden + attended @ w["out"][layer]
        logits: NDArray[np.float64] = hidden @ w["embed"].T
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continue a prompt with the argmax of dense_logits."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@dataclass
class DrivenRequest:
    """What the stand-in scheduler knows of one request."""

    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_new: bool = True


class StepDriver:
    """Schedules by hand: the test says which request gets how many tokens; blocks come in scattered order."""

    def __init__(
        self,
        model: ScriptedModel | TinyAttentionModel,
        vocab_size: int,
        *,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        logprobs_mode: str = "raw_logprobs",
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        backend = select_backend(CPU)
        num_blocks = 1 + max_num_seqs * (max_model_len // BLOCK_SIZE + 1)
        kv_caches = [
            backend.allocate_kv_cache(
                num_blocks,
                BLOCK_SIZE,
                num_kv_heads=model.num_kv_heads,
                head_size=model.head_size,
                dtype=torch.float32,
            )
            for _ in range(model.num_layers)
        ]
        limits = RunnerLimits(max_num_seqs, 512, max_model_len, BLOCK_SIZE, vocab_size)
        runner_model: CausalLM = model
        self.runner = ModelRunner(
            runner_model,
            kv_caches,
            limits,
            logprobs_mode=logprobs_mode,
            processors=ProcessorChain(list(processors)),
        )
        self.requests: dict[str, DrivenRequest] = {}
        self._free_blocks = np.random.default_rng(1).permutation(np.arange(1, num_blocks)).tolist()
        self._gone: list[str] = []
        self._preempted: list[str] = []
        self._num_steps = 0

    def add(self, req_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue a request."""
        self.requests[req_id] = DrivenRequest(params, list(prompt), len(prompt))

    def finish(self, req_id: str) -> None:
        """End a request: the worker is told in the next step."""
        self._free_blocks += self.requests.pop(req_id).block_ids
        self._gone.append(req_id)

    def preempt(self, req_id: str) -> None:
        """Take a request's blocks away; it is sent as new, with all its tokens, when it is scheduled again."""
        request = self.requests[req_id]
        self._free_blocks += request.block_ids
        request.block_ids, request.num_computed_tokens, request.is_new = [], 0, True
        self._preempted.append(req_id)

    def plan(self, num_scheduled_tokens: dict[str, int]) -> SchedulerOutput:
        """Give the scheduler output that computes these numbers of tokens."""
        new: list[NewRequestData] = []
        cached = CachedRequestData([], [], [])
        for req_id, count in num_scheduled_tokens.items():
            request = self.requests[req_id]
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            missing = -(-end // BLOCK_SIZE) - len(request.block_ids)
            blocks = [self._free_blocks.pop() for _ in range(missing)]
            request.block_ids += blocks
            if request.is_new:
                new.append(
                    NewRequestData(
                        req_id,
                        list(request.token_ids),
                        request.num_prompt_tokens,
                        request.params,
                        list(request.block_ids),
                        start,
                    )
                )
            else:
                cached.req_ids.append(req_id)
                cached.new_block_ids.append(blocks)
                cached.num_computed_tokens.append(start)
            request.is_new = False
            request.num_computed_tokens = end
        output = SchedulerOutput(
            step_index=self._num_steps,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict(num_scheduled_tokens),
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            finished_req_ids=self._gone,
            preempted_req_ids=self._preempted,
        )
        self._gone, self._preempted = [], []
        self._num_steps += 1
        return output

    def step(self, num_scheduled_tokens: dict[str, int], grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Run one step and keep its tokens."""
        parked = self.runner.execute_model(self.plan(num_scheduled_tokens))
        output = parked if parked is not None else self.runner.sample_tokens(grammar)
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if req_id in self.requests:
                self.requests[req_id].token_ids += token_ids
        return output

    def step_all(self, chunk: int = 512) -> ModelRunnerOutput:
        """Run one step in which every request computes what it has, at most chunk tokens each."""
        return self.step(
            {
                req_id: min(chunk, len(request.token_ids) - request.num_computed_tokens)
                for req_id, request in self.requests.items()
            }
        )

    def output_of(self, req_id: str) -> list[int]:
        """Give the tokens generated so far."""
        request = self.requests[req_id]
        return request.token_ids[request.num_prompt_tokens :]
