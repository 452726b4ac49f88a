"""The MODEL argument: only what can be on a network is looked for there."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.config import Environment
from serve.entrypoints.model_argument import check_model_argument, needs_download
from serve.errors import ConfigError


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(
        cache_dir=tmp_path / "cache",
        api_keys=(),
        log_level="info",
        no_color=True,
        hub_offline=True,
        engine_ready_timeout=1.0,
        ipc_dir=tmp_path,
    )


@pytest.mark.parametrize("name", ["owner/name", "owner/name-1.5B_x", "smollm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_hub_ids_and_names_of_the_table_may_need_a_download(environment: Environment, name: str) -> None:
    assert needs_download(name, environment)
    check_model_argument(name, environment)


@pytest.mark.parametrize(
    "name",
    ["./a", "/a/b", "~/a", "~nobody/a", "a.gguf", "a/b.gguf", "a/b.safetensors", "a/b/c", "a", "a/b c", "x" * 999],
)
def test_what_can_only_be_a_missing_path_is_refused_without_a_network(environment: Environment, name: str) -> None:
    assert not needs_download(name, environment)
    with pytest.raises(ConfigError) as caught:
        check_model_argument(name, environment)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("bench", ""),
        ("run_batch", " (did you mean run-batch?)"),
        ("smollm2-135m", " (did you mean smollm2-135m-instruct?)"),
    ],
)
def test_a_word_that_is_no_model_may_have_been_meant_as_a_command(
    environment: Environment, word: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model_argument(word, environment)
    assert str(caught.value).startswith(f"no such command or model: '{word}'{hint}; commands: pull, run-batch; ")
    assert caught.value.exit_code == 3


def test_local_model_needs_no_download_whatever_its_name(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not needs_download("owner/name", environment)
    assert not needs_download(str(tmp_path / "owner"), environment)
    check_model_argument("owner/name", environment)
