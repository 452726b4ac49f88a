"""The worker under the real scheduler: outputs equal the dense model's, whatever the schedule was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import CacheConfig, EngineConfig, SchedulerConfig, resolve
from serve.core.engine_core import EngineCore
from serve.core.executor.uniproc import UniprocExecutor
from serve.errors import InvalidRequest
from serve.models.registry import CausalLM
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest
from serve.worker.worker import Worker
from tests.fakes_worker import TinyAttentionModel

VOCAB = 61
MAX_STEPS = 2000
MODEL = TinyAttentionModel(VOCAB)
CHECKPOINT = Checkpoint(
    name="tiny",
    root="",
    format="safetensors",
    weight_files=(),
    arch=ModelArch(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=MODEL.hidden_size,
        intermediate_size=40,
        num_layers=MODEL.num_layers,
        num_heads=MODEL.num_heads,
        num_kv_heads=MODEL.num_kv_heads,
        head_size=MODEL.head_size,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_theta=10000.0,
    ),
)


def load_tiny(_c: Checkpoint, _e: EngineConfig, _t: torch.dtype, _d: torch.device) -> CausalLM:
    # Comes after the worker chose its threads: for matrices this small, waiting for a second thread is all cost.
    torch.set_num_threads(1)
    return MODEL


@contextmanager
def engine(
    *, is_async: bool, num_blocks: int = 200, budget: int = 64, prefix_caching: bool = True
) -> Iterator[EngineCore]:
    config = EngineConfig(
        cache=CacheConfig(num_gpu_blocks_override=num_blocks, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            async_scheduling=is_async,
            scheduler_reserve_full_isl=False,
        ),
    )
    executor = UniprocExecutor(
        lambda settings, checkpoint: Worker(settings, checkpoint, load_tiny), resolve(config, 128), CHECKPOINT
    )
    core = EngineCore(config=resolve(config, 128), checkpoint=CHECKPOINT, executor=executor, report=lambda _: None)
    try:
        yield core
    finally:
        executor.shutdown()


def add(core: EngineCore, req_id: str, prompt: list[int], params: SamplingParams) -> None:
    core.add_request(core.prepare_request(EngineCoreRequest(req_id, prompt, params, 0.0)))


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    """Step until nothing is left; gives all outputs by request."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(MAX_STEPS):
        by_client, _ = core.step_once()
        for message in by_client.values():
            for output in message.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        if not core.has_work:
            return outputs
    raise AssertionError(f"still busy after {MAX_STEPS} steps")


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(5)
    return {f"r{length}": [int(t) for t in rng.integers(0, VOCAB, length)] for length in (1, 15, 16, 17, 40, 70)}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [200, 9], ids=["roomy", "preempting"])
@pytest.mark.parametrize("budget", [11, 64])
def test_greedy_outputs_equal_the_dense_model(is_async: bool, num_blocks: int, budget: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    num_preemptions = 0
    with engine(is_async=is_async, num_blocks=num_blocks, budget=budget) as core:
        for req_id, prompt in prompts().items():
            add(core, req_id, prompt, params)
        outputs = run(core)
        num_preemptions = sum(event.type == 3 for each in outputs.values() for o in each for event in o.events or [])
        assert core.scheduler.kv.pool.num_free_blocks == num_blocks - 1
    for req_id, prompt in prompts().items():
        assert tokens_of(outputs[req_id]) == MODEL.greedy(prompt, 24)
    if num_blocks == 9:
        assert num_preemptions > 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_seeded_outputs_do_not_depend_on_schedule_or_company(is_async: bool) -> None:
    seeded = SamplingParams(temperature=1.3, top_p=0.9, seed=11, frequency_penalty=0.3, max_tokens=30)
    with engine(is_async=False) as core:
        add(core, "alone", prompts()["r17"], seeded)
        expected = tokens_of(run(core)["alone"])
    with engine(is_async=is_async, num_blocks=9, budget=13) as core:
        for req_id, prompt in prompts().items():
            add(core, req_id, prompt, seeded if req_id == "r17" else SamplingParams(max_tokens=30))
        outputs = run(core)
    assert tokens_of(outputs["r17"]) == expected
    assert len(expected) == 30


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_stop_id_ends_a_request_whose_next_step_is_already_planned(is_async: bool) -> None:
    prompt = prompts()["r16"]
    dense = MODEL.greedy(prompt, 12)
    stop = dense[5]
    params = SamplingParams(temperature=0.0, max_tokens=12, eos_token_id=stop, all_stop_token_ids=(stop,))
    with engine(is_async=is_async) as core:
        add(core, "a", prompt, params)
        add(core, "b", prompt, SamplingParams(temperature=0.0, max_tokens=12))
        outputs = run(core)
    assert tokens_of(outputs["a"]) == dense[: dense.index(stop) + 1]
    assert tokens_of(outputs["b"]) == dense


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_context_limit_ends_a_request(is_async: bool) -> None:
    prompt = (prompts()["r70"] * 2)[:126]
    with engine(is_async=is_async) as core:
        add(core, "a", prompt, SamplingParams(temperature=0.0, max_tokens=50))
        outputs = run(core)["a"]
    assert tokens_of(outputs) == MODEL.greedy(prompt, 2)
    assert str(outputs[-1].finish_reason) == "length"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_prompt_logprobs_survive_prefix_cache_and_chunks(is_async: bool) -> None:
    prompt = prompts()["r70"]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, skip_reading_prefix_cache=True)
    with engine(is_async=is_async, budget=16) as core:
        add(core, "first", prompt, SamplingParams(temperature=0.0, max_tokens=2))
        run(core)
        add(core, "second", prompt, params)
        outputs = run(core)["second"]
    tables = [output.new_prompt_logprobs for output in outputs if output.new_prompt_logprobs is not None]
    assert len(tables) == 1
    expected = torch.log_softmax(torch.from_numpy(MODEL.dense_logits(prompt)), dim=-1)[:-1]
    own = expected[torch.arange(69), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(tables[0].logprobs[:, 0], own.numpy(), atol=1e-3)


def test_failed_row_ends_its_request_with_the_cause() -> None:
    hopeless = SamplingParams(temperature=0.0, max_tokens=5, allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    with engine(is_async=True) as core:
        add(core, "bad", [1, 2], hopeless)
        add(core, "good", [1, 2], SamplingParams(temperature=0.0, max_tokens=5))
        outputs = run(core)
    assert outputs["bad"][-1].error is not None
    assert outputs["bad"][-1].error.startswith("invalid_request: ")
    assert tokens_of(outputs["good"]) == MODEL.greedy([1, 2], 5)


def embeds_of(prompt: list[int]) -> np.ndarray:
    """Give the embeddings that the model itself looks up."""
    return MODEL.embeddings()[prompt]


def add_embeds(core: EngineCore, req_id: str, embeds: np.ndarray, params: SamplingParams) -> None:
    message = EngineCoreRequest(req_id, [0] * len(embeds), params, 0.0, prompt_embeds=embeds)
    core.add_request(core.prepare_request(message))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [200, 9], ids=["roomy", "preempting"])
@pytest.mark.parametrize("budget", [11, 64])
def test_prompts_given_as_embeddings_answer_like_their_tokens(is_async: bool, num_blocks: int, budget: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.0)
    with engine(is_async=is_async, num_blocks=num_blocks, budget=budget) as core:
        for index, (req_id, prompt) in enumerate(prompts().items()):
            if index % 2:
                add(core, req_id, prompt, params)
            else:
                add_embeds(core, req_id, embeds_of(prompt), params)
        outputs = run(core)
    for req_id, prompt in prompts().items():
        assert tokens_of(outputs[req_id]) == MODEL.greedy(prompt, 24)


def test_the_prefix_cache_knows_embeddings_by_their_content() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    prompt = prompts()["r40"]
    other = embeds_of(prompt)
    other[17] *= -1.0
    with engine(is_async=True) as core:
        hits = []
        for req_id, embeds in (("a", embeds_of(prompt)), ("b", embeds_of(prompt)), ("c", other)):
            add_embeds(core, req_id, embeds, params)
            outputs = run(core)[req_id]
            stats = next(output.prefill_stats for output in outputs if output.prefill_stats is not None)
            hits.append(stats.num_cached_tokens)
        add(core, "zeros", [0] * 40, params)
        zeros = run(core)["zeros"]
    assert hits == [0, 32, 16]
    assert tokens_of(zeros) == MODEL.greedy([0] * 40, 4)


def test_embeddings_of_the_wrong_width_never_reach_a_step() -> None:
    with engine(is_async=False) as core, pytest.raises(InvalidRequest, match=r"shape \[3, 5\]"):
        add_embeds(core, "r", np.zeros((3, 5), dtype=np.float32), SamplingParams())


def test_penalties_do_not_count_the_ids_of_embeddings() -> None:
    """The ids of such a prompt are all 0; a repetition penalty must not take them for a token that was seen."""
    pairs = itertools.product(range(VOCAB), repeat=2)
    prompt = next(list(pair) for pair in pairs if 0 not in pair and MODEL.greedy(pair, 1) == [0])
    with engine(is_async=False) as core:
        params = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=1e9)
        add_embeds(core, "r", embeds_of(prompt), params)
        assert tokens_of(run(core)["r"]) == [0]
