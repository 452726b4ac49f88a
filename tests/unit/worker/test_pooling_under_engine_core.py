"""Pooling models under the real scheduler and worker: results equal transformers', whatever the schedule was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from serve.checkpoint.runner import describe_model
from serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from serve.core.engine_core import EngineCore
from serve.core.executor.uniproc import UniprocExecutor
from serve.errors import ConfigError, InvalidRequest
from serve.models.pooling import PoolingModel, load_pooling_model
from serve.pooling_params import PoolingParams
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, EventType, FinishReason
from serve.worker.worker import Worker
from tests.checkpoints import MAX_MODEL_LEN
from tests.pooling_checkpoints import ENCODER_POSITIONS, build_pooling_reference, write_pooling_checkpoint

MAX_STEPS = 500
PROMPTS = {
    f"r{length}": [int(i) for i in np.random.default_rng(length).integers(3, 300, length)]
    for length in (90, 64, 40, 17, 16, 15, 2, 1)
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("LlamaModel", "BertModel", "BertForSequenceClassification")
    base = tmp_path_factory.mktemp("pooling")
    return {name: write_pooling_checkpoint(base / name, name) for name in names}


@contextmanager
def engine(
    folder: Path,
    *,
    model: ModelConfig | None = None,
    cache_config: CacheConfig | None = None,
    **scheduler: object,
) -> Iterator[EngineCore]:
    asked = EngineConfig(
        model=replace(model or ModelConfig(), model=str(folder)),
        cache=cache_config or CacheConfig(num_gpu_blocks_override=200),
        scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
    )
    checkpoint, config = describe_model(folder, asked)

    def load_on_one_thread(_c: object, _e: EngineConfig, dtype: torch.dtype, device: torch.device) -> PoolingModel:
        torch.set_num_threads(1)
        return load_pooling_model(checkpoint, config.model, dtype=dtype, device=device)

    executor = UniprocExecutor(lambda c, k: Worker(c, k, load_on_one_thread), config, checkpoint)
    core = EngineCore(config, checkpoint, executor, report=lambda stage: None)
    try:
        yield core
    finally:
        executor.shutdown()


def add(core: EngineCore, req_id: str, prompt: list[int], params: PoolingParams, *, skips_cache: bool = True) -> None:
    message = EngineCoreRequest(
        req_id,
        prompt,
        SamplingParams(max_tokens=1, skip_reading_prefix_cache=skips_cache),
        arrival_time=0.0,
        pooling_params=params,
    )
    core.add_request(core.prepare_request(message))


def run(core: EngineCore) -> dict[str, EngineCoreOutput]:
    """Turn the loop until all is done; every request gives exactly one output."""
    outputs: dict[str, EngineCoreOutput] = {}
    for _ in range(MAX_STEPS):
        if not core.has_work:
            break
        by_client, _ = core.step_once()
        for message in by_client.values():
            for output in message.outputs:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
        assert core.scheduler.check_integrity() is None
    assert core.scheduler.num_unfinished == 0
    assert core.scheduler.kv.pool.usage == 0.0
    return outputs


reference = cache(build_pooling_reference)


@torch.no_grad()
def expected_vector(architecture: str, prompt: list[int], kind: str) -> np.ndarray:
    rows = reference(architecture)(torch.tensor([prompt])).last_hidden_state[0]
    vector = {"cls": rows[0], "last": rows[-1], "mean": rows.mean(dim=0)}[kind]
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize(
    ("kind", "budget", "num_blocks"),
    [("last", 512, 200), ("last", 20, 8), ("mean", 7, 200), ("mean", 20, 8), ("cls", 20, 8)],
)
def test_decoder_prompts_in_any_schedule_equal_transformers(
    folders: dict[str, Path], kind: str, budget: int, num_blocks: int
) -> None:
    model = ModelConfig(pooler_config={"pooling_type": kind}, max_model_len=96)
    blocks = CacheConfig(num_gpu_blocks_override=num_blocks)
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 8), "scheduler_reserve_full_isl": False}
    if num_blocks == 8:
        # Two long prompts grow side by side until the pool is empty.
        limits["long_prefill_token_threshold"] = 10
    with engine(folders["LlamaModel"], model=model, cache_config=blocks, **limits) as core:
        assert not core.schedules_ahead
        for req_id, prompt in PROMPTS.items():
            add(core, req_id, prompt, PoolingParams(), skips_cache=kind != "last")
        outputs = run(core)
    kinds = [event.type for output in outputs.values() for event in output.events or []]
    assert (EventType.PREEMPTED in kinds) == (num_blocks == 8)
    for req_id, prompt in PROMPTS.items():
        output = outputs[req_id]
        assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [])
        expected = expected_vector("LlamaModel", prompt, kind)
        np.testing.assert_allclose(output.pooling_output, expected, atol=2e-5)


def test_decoder_reuses_a_cached_prefix_and_gives_the_same_vector(folders: dict[str, Path]) -> None:
    prompt = PROMPTS["r64"]
    with engine(folders["LlamaModel"]) as core:
        vectors = []
        for req_id in ("first", "second"):
            add(core, req_id, prompt, PoolingParams(), skips_cache=False)
            output = run(core)[req_id]
            assert output.prefill_stats is not None
            assert output.prefill_stats.num_cached_tokens == (0 if req_id == "first" else 48)
            vectors.append(output.pooling_output)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)


def test_prompt_as_long_as_the_context_is_pooled_in_chunks(folders: dict[str, Path]) -> None:
    prompt = [5 + i % 200 for i in range(MAX_MODEL_LEN)]
    with engine(folders["LlamaModel"], max_num_batched_tokens=100, max_num_seqs=4) as core:
        add(core, "a", prompt, PoolingParams())
        np.testing.assert_allclose(
            run(core)["a"].pooling_output, expected_vector("LlamaModel", prompt, "last"), atol=2e-5
        )
        with pytest.raises(InvalidRequest, match=f"1 to {MAX_MODEL_LEN}"):
            add(core, "b", [*prompt, 1], PoolingParams())


def test_token_embeddings_of_a_prompt_in_chunks_are_one_row_each(folders: dict[str, Path]) -> None:
    with engine(folders["LlamaModel"], max_num_batched_tokens=16, max_num_seqs=4) as core:
        add(core, "a", PROMPTS["r40"], PoolingParams("token_embed", use_activation=False))
        rows = run(core)["a"].pooling_output
    with torch.no_grad():
        expected = reference("LlamaModel")(torch.tensor([PROMPTS["r40"]])).last_hidden_state[0]
    np.testing.assert_allclose(rows, expected.numpy(), atol=2e-4)


def test_encoder_runs_each_prompt_in_one_step_without_a_cache(folders: dict[str, Path]) -> None:
    with engine(folders["BertModel"], max_num_batched_tokens=ENCODER_POSITIONS, max_num_seqs=4) as core:
        prompts = {**PROMPTS, "full": [7] * ENCODER_POSITIONS}
        for req_id, prompt in prompts.items():
            add(core, req_id, prompt, PoolingParams())
        outputs = run(core)
        assert (core.ready.max_model_len, core.ready.kv_cache_size_tokens) == (ENCODER_POSITIONS, 0)
    for req_id, prompt in prompts.items():
        expected = expected_vector("BertModel", prompt, "cls")
        np.testing.assert_allclose(outputs[req_id].pooling_output, expected, atol=2e-5)


@torch.no_grad()
def test_pairs_of_texts_beside_single_ones_keep_their_token_types(folders: dict[str, Path]) -> None:
    model = reference("BertForSequenceClassification")
    cases = {"alone": (PROMPTS["r15"], None), "pair": (PROMPTS["r16"], 6), "other": (PROMPTS["r17"], 1)}
    with engine(folders["BertForSequenceClassification"]) as core:
        for req_id, (prompt, second) in cases.items():
            add(core, req_id, prompt, PoolingParams("classify", second_text_start=second))
        outputs = run(core)
    for req_id, (prompt, second) in cases.items():
        types = [int(second is not None and i >= second) for i in range(len(prompt))]
        logits = model(torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits[0]
        np.testing.assert_allclose(outputs[req_id].pooling_output, logits.softmax(dim=-1).numpy(), atol=1e-5)


def test_aborted_request_gives_its_blocks_back(folders: dict[str, Path]) -> None:
    with engine(folders["LlamaModel"], max_num_batched_tokens=16, max_num_seqs=4) as core:
        add(core, "a", PROMPTS["r90"], PoolingParams())
        add(core, "b", PROMPTS["r40"], PoolingParams())
        core.step_once()
        core.abort_requests(["a"])
        assert set(run(core)) == {"b"}


def test_broken_result_fails_its_request_alone(tmp_path: Path) -> None:
    folder = write_pooling_checkpoint(tmp_path, "BertModel")
    with engine(folder) as core:
        worker_model = core._executor._worker._model  # type: ignore[attr-defined]
        forward = worker_model.forward

        def poison(inputs: object, caches: object) -> torch.Tensor:
            hidden = forward(inputs, caches)
            hidden[inputs.input_ids == 9] = float("nan")  # type: ignore[attr-defined]
            return hidden

        worker_model.forward = poison
        add(core, "good", [7, 8], PoolingParams())
        add(core, "bad", [9, 8], PoolingParams())
        outputs = run(core)
    assert outputs["good"].finish_reason is FinishReason.STOP
    assert outputs["bad"].finish_reason is FinishReason.ERROR
    assert outputs["bad"].error == "nan_output: the model's result for this prompt holds NaN or infinity"


def test_requests_for_the_other_kind_of_model_are_refused(folders: dict[str, Path]) -> None:
    with engine(folders["BertModel"]) as core:
        message = EngineCoreRequest("a", [1, 2], SamplingParams(), arrival_time=0.0)
        with pytest.raises(InvalidRequest, match="gives pooled results, not tokens"):
            core.prepare_request(message)


def test_step_that_cannot_hold_the_longest_prompt_of_an_encoder_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 32 is below max_model_len=96"):
        describe_model(
            folders["BertModel"],
            EngineConfig(model=ModelConfig(model="m"), scheduler=SchedulerConfig(max_num_batched_tokens=32)),
        )
