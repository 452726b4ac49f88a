"""Mistakes that need a file to be seen end the start before the engine has loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from serve.config import EngineConfig, Environment, ModelConfig, SchedulerConfig, read_environment
from serve.entrypoints.cli import main
from serve.entrypoints.start_checks import check_against_model, check_chat_template
from serve.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return replace(read_environment(), cache_dir=tmp_path / "cache", hub_offline=True)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return str(model)


def engine_config(model: str, max_model_len: int | None = None, **scheduler: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, load_format="dummy", max_model_len=max_model_len),
        scheduler=replace(SchedulerConfig(), **scheduler),
    )


def test_a_length_above_the_context_of_a_local_model_is_refused(folder: str, environment: Environment) -> None:
    check_against_model(engine_config(folder, 96), environment)
    with pytest.raises(ConfigError, match=r"--max-model-len 97 .* 96 tokens"):
        check_against_model(engine_config(folder, 97), environment)


def test_a_budget_below_the_requests_of_a_step_is_refused(folder: str, environment: Environment) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 4 is below --max-num-seqs 8"):
        check_against_model(engine_config(folder, max_num_batched_tokens=4, max_num_seqs=8), environment)


def test_a_model_that_must_be_fetched_is_not_looked_at(environment: Environment) -> None:
    check_against_model(engine_config("smollm2-135m-instruct", 10**9), environment)
    assert not environment.cache_dir.exists()


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ messages", "{% nonsense %}"])
def test_a_broken_template_is_refused_as_text_and_as_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for value in (text, str(file)):
        with pytest.raises(ConfigError, match=r"--chat-template.* is not valid"):
            check_chat_template(value)


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for value in (str(tmp_path / "none"), "none.jinja", str(tmp_path)):
        with pytest.raises(ConfigError, match="neither a readable file nor Jinja text"):
            check_chat_template(value)


def test_a_good_template_and_a_name_that_the_tokenizer_may_know_pass(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for value in (str(file), "{{ messages }}", "tool_use"):
        check_chat_template(value)


def test_the_template_is_checked_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--chat-template", "/no/such.jinja", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("serve: error: --chat-template /no/such.jinja")
