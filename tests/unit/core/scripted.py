"""Scheduler, requests and a worker for the tests of core: a model whose next token is a plain function of the text."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import replace

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from serve.core.block_hash import BlockHasher
from serve.core.kv_cache_manager import KVCacheManager
from serve.core.request import Request
from serve.core.scheduler import ClientOutputs, Scheduler
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest
from serve.wire.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput, StepCost

BLOCK_SIZE = 16
VOCAB_SIZE = 97


def next_token(token_ids: list[int]) -> int:
    """Give the model's next token: a hash of all tokens so far, so that any lost or stale token shows."""
    digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def continue_text(token_ids: list[int], num_tokens: int) -> list[int]:
    """Give the tokens the model adds to a prompt."""
    text = list(token_ids)
    for _ in range(num_tokens):
        text.append(next_token(text))
    return text[len(token_ids) :]


class ScriptedRunner:
    """Follows the scheduler's messages like a worker: keeps the tokens, the block tables and what each slot holds.

    A slot is written with the salt and all tokens up to its own, so a read of a block that holds other content fails.
    """

    def __init__(self, block_size: int = BLOCK_SIZE, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.slots: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.salts: dict[str, str | None] = {}
        self.errors: dict[str, str] = {}
        self.steps: list[SchedulerOutput] = []

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step and sample."""
        self.steps.append(step)
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            del self.tokens[req_id], self.tables[req_id]
        computed = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tokens
            self.tokens[new.req_id] = list(new.token_ids)
            self.tables[new.req_id] = list(new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for req_id, blocks, num in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self.tables[req_id].extend(blocks)
            computed[req_id] = num
        assert list(step.num_scheduled_tokens) == [*cached.req_ids, *(new.req_id for new in step.scheduled_new_reqs)]
        written: set[int] = set()
        for req_id, num in step.num_scheduled_tokens.items():
            written |= self._write(req_id, computed[req_id], computed[req_id] + num, written)
        sampled = [self._sample(req_id, computed[req_id] + num) for req_id, num in step.num_scheduled_tokens.items()]
        errors = {req_id: text for req_id, text in self.errors.items() if req_id in step.num_scheduled_tokens}
        return ModelRunnerOutput(list(step.num_scheduled_tokens), sampled, errors=errors)

    def _write(self, req_id: str, start: int, end: int, written: set[int]) -> set[int]:
        slots = set()
        for position in range(start, end):
            slot = self._slot(req_id, position)
            assert slot not in written, f"slot {slot} is written twice in one step"
            assert slot >= self.block_size, "a token would be written to the null block"
            self.slots[slot] = (self.salts.get(req_id), tuple(self.tokens[req_id][: position + 1]))
            slots.add(slot)
        return slots

    def _sample(self, req_id: str, end: int) -> list[int]:
        text = self.tokens[req_id]
        assert end <= len(text), f"{req_id}: token {end - 1} is not known"
        first = 0 if self.window is None else max(0, end - self.window)
        for position in range(first, end):
            held = self.slots.get(self._slot(req_id, position))
            assert held == (self.salts.get(req_id), tuple(text[: position + 1])), (
                f"{req_id}: position {position} holds other content"
            )
        if end < len(text):
            return []
        token = next_token(text)
        text.append(token)
        return [token]

    def _slot(self, req_id: str, position: int) -> int:
        return self.tables[req_id][position // self.block_size] * self.block_size + position % self.block_size


class Loop:
    """A scheduler and a scripted worker, with up to num_batches steps in flight. outputs holds all that came out."""

    def __init__(self, scheduler: Scheduler, num_batches: int = 1, runner: ScriptedRunner | None = None) -> None:
        self.scheduler = scheduler
        self.runner = runner or ScriptedRunner(scheduler.kv.block_size)
        self.num_batches = num_batches
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def dispatch(self) -> SchedulerOutput | None:
        """Schedule a step and run it without folding it in; None when it was empty."""
        step = self.scheduler.schedule()
        if not (step.total_num_scheduled_tokens or step.finished_req_ids or step.preempted_req_ids):
            self.scheduler.cancel_step(step)
            return None
        self.in_flight.append((step, self.runner.run(step)))
        return step

    def fold(self) -> ClientOutputs:
        """Fold the oldest step in flight."""
        step, result = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(step, result)
        for message in outputs.values():
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def turn(self) -> SchedulerOutput | None:
        """Do one turn of the engine's loop; gives the step it scheduled."""
        step = self.dispatch() if len(self.in_flight) < self.num_batches else None
        if self.in_flight and (len(self.in_flight) >= self.num_batches or step is None):
            self.fold()
        return step

    def run_to_end(self, max_turns: int = 10_000) -> list[SchedulerOutput]:
        """Turn until nothing is left; gives all steps."""
        steps = []
        while self.scheduler.has_work or self.in_flight:
            step = self.turn()
            if step is not None:
                steps.append(step)
            max_turns -= 1
            assert max_turns, "the scheduler makes no progress"
        return steps

    def tokens_of(self, req_id: str) -> list[int]:
        """Give all tokens that came out for a request."""
        return [token for output in self.outputs.get(req_id, []) for token in output.new_token_ids]

    def last_of(self, req_id: str) -> EngineCoreOutput:
        """Give the last output of a request."""
        return self.outputs[req_id][-1]


def make_kv(
    num_blocks: int = 65,
    *,
    max_model_len: int = 512,
    caching: bool = True,
    window: int | None = None,
    watermark: float = 0.0,
    max_step_tokens: int = 256,
    block_size: int = BLOCK_SIZE,
) -> KVCacheManager:
    """Give a cache manager over num_blocks blocks, the null block included."""
    hasher = BlockHasher(block_size, algorithm="sha256", domain="test", seed="test") if caching else None
    return KVCacheManager(
        num_blocks,
        block_size,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        hasher=hasher,
        sliding_window=window,
        watermark=watermark,
    )


def make_scheduler(
    kv: KVCacheManager | None = None, *, max_model_len: int = 512, cost: StepCost | None = None, **settings: object
) -> Scheduler:
    """Give a scheduler with a budget of 256 tokens and 16 requests, other settings as in SchedulerConfig."""
    open_settings = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16, long_prefill_token_threshold=0)
    config = replace(open_settings, **settings)  # type: ignore[arg-type]
    return Scheduler(config, kv or make_kv(max_model_len=max_model_len), max_model_len=max_model_len, cost=cost)


def make_request(
    req_id: str,
    prompt: list[int] | int,
    *,
    params: SamplingParams | None = None,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    client_index: int = 0,
) -> Request:
    """Give a request; an int prompt stands for that many tokens, different for each request id."""
    if isinstance(prompt, int):
        start = sum(req_id.encode())
        prompt = [(start + 7 * i) % VOCAB_SIZE for i in range(prompt)]
    return Request.from_wire(
        EngineCoreRequest(
            req_id,
            prompt,
            params or SamplingParams(max_tokens=8),
            arrival_time,
            cache_salt=cache_salt,
            client_index=client_index,
            priority=priority,
        )
    )


class ScriptedWorker:
    """A worker with the scripted model, for the engine core and its process. available is the cache's bytes."""

    dtype_name = "float32"

    def __init__(self, available: int = 1 << 20, block_size: int = BLOCK_SIZE) -> None:
        self.available = available
        self.runner = ScriptedRunner(block_size)
        self.calls: list[str] = []
        self.fail_at_step: int | None = None
        self._parked: ModelRunnerOutput | None = None

    def init_device(self) -> None:
        self.calls.append("init_device")

    def load_model(self) -> None:
        self.calls.append("load_model")

    def get_kv_cache_spec(self) -> KVCacheSpec:
        size = self.runner.block_size
        return KVCacheSpec(
            num_layers=2,
            block_size=size,
            num_kv_heads=1,
            head_size=8,
            dtype="float32",
            page_size_bytes=2 * size * 8 * 4,
        )

    def determine_available_memory(self) -> int:
        self.calls.append("determine_available_memory")
        return self.available

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.calls.append(f"initialize_kv_cache {config.num_blocks}")

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def measure_step_cost(self) -> StepCost | None:
        self.calls.append("measure_step_cost")
        return None

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        assert self._parked is None
        if len(self.runner.steps) == self.fail_at_step:
            raise RuntimeError("injected failure of the forward pass")
        result = self.runner.run(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return result
        self._parked = result
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        result, self._parked = self._parked, None
        assert result is not None
        return result

    def run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.execute_model(scheduler_output) or self.sample_tokens(None)

    def device_description(self) -> str:
        return "scripted"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_checkpoint() -> Checkpoint:
    """Give the description of the scripted model."""
    arch = ModelArch(
        architecture="ScriptedForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=16,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        rope_theta=10_000.0,
    )
    return Checkpoint(name="scripted", root=".", format="safetensors", weight_files=(), arch=arch)


def make_config(*, max_model_len: int = 256, cache: CacheConfig | None = None, **scheduler: object) -> EngineConfig:
    """Give resolved engine settings: 256 tokens a step, 16 requests, other fields as in SchedulerConfig."""
    open_settings = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16, long_prefill_token_threshold=0)
    settings = replace(open_settings, **scheduler)  # type: ignore[arg-type]
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len), cache=cache or CacheConfig(), scheduler=settings
    )
