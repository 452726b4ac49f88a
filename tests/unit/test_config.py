"""Settings that cannot work are refused with the flag, the value and the way out; resolve fills what was left open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.config import EngineConfig, ModelConfig, SchedulerConfig, ServeConfig, resolve, validate
from serve.errors import ConfigError


def engine(max_model_len: int | None = None, **scheduler: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        scheduler=replace(SchedulerConfig(), **scheduler),  # type: ignore[arg-type]
    )


def test_open_settings_are_filled_from_the_models_context() -> None:
    resolved = resolve(engine(), 4096)
    assert resolved.model.max_model_len == 4096
    assert (resolved.scheduler.max_num_batched_tokens, resolved.scheduler.max_num_seqs) == (512, 128)
    # Left to the engine core, which measures what a step costs.
    assert resolved.scheduler.long_prefill_token_threshold is None


def test_a_given_budget_leaves_a_quarter_of_a_step_to_other_requests() -> None:
    assert resolve(engine(max_num_batched_tokens=512), 4096).scheduler.long_prefill_token_threshold == 384


def test_more_running_requests_than_a_default_step_holds_make_the_step_larger() -> None:
    assert resolve(engine(max_num_seqs=600), 4096).scheduler.max_num_batched_tokens == 600
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 512 is below --max-num-seqs 600"):
        resolve(engine(max_num_seqs=600, max_num_batched_tokens=512), 4096)


def test_one_prompt_may_take_the_whole_step_when_asked_or_when_it_cannot_be_cut() -> None:
    for settings in ({"long_prefill_token_threshold": 0}, {"enable_chunked_prefill": False}):
        assert resolve(engine(**settings), 4096).scheduler.long_prefill_token_threshold == 0  # type: ignore[arg-type]


def test_a_length_beyond_the_models_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="8192 exceeds the model's context of 4096"):
        resolve(engine(8192), 4096)


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt() -> None:
    for length, budget in ((None, 4096), (3000, 3000), (-1, 4096)):
        resolved = resolve(engine(length, enable_chunked_prefill=False), 4096)
        assert resolved.scheduler.max_num_batched_tokens == budget


@pytest.mark.parametrize("length", [None, 3000, -1])
def test_without_chunked_prefill_a_budget_below_the_longest_prompt_is_refused(length: int | None) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 512 is below"):
        resolve(engine(length, enable_chunked_prefill=False, max_num_batched_tokens=512), 4096)


@pytest.mark.parametrize("override", [{"temprature": 0.5}, {"temperature": "0.5"}, {"top_p": True}, {"top_k": None}])
def test_an_override_of_sampling_values_that_would_have_no_effect_is_refused(override: dict[str, float | int]) -> None:
    config = ServeConfig(engine=EngineConfig(model=ModelConfig(override_generation_config=override)))
    with pytest.raises(ConfigError, match=f"--override-generation-config {next(iter(override))}"):
        validate(config)


def test_a_usable_override_of_sampling_values_passes() -> None:
    override: dict[str, float | int] = {"temperature": 0.5, "top_k": 20, "max_new_tokens": 100}
    config = ServeConfig(engine=EngineConfig(model=ModelConfig(override_generation_config=override)))
    validate(config)
    assert config.engine.model.override_generation_config == override


def test_a_queue_without_room_for_any_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-waiting-tokens 0"):
        validate(ServeConfig(engine=engine(max_waiting_tokens=0)))
