"""The command line: flags from the settings, one-line complaints, exit codes, and nothing slow before the check."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.config import ServeConfig, groups
from serve.entrypoints.cli import main
from serve.entrypoints.flags import (
    FOREIGN_FLAGS,
    build_parser,
    config_from_flags,
    flag_name,
    parse_bytes,
    parse_count,
    parse_flags,
)
from serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def config_of(*argv: str) -> ServeConfig:
    parsed = parse_flags(build_parser(), argv)
    del parsed.version
    return config_from_flags(parsed)


def serve(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serve", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def test_no_flags_give_the_defaults() -> None:
    assert config_of() == ServeConfig()


def test_every_setting_has_its_flag_in_the_help() -> None:
    text = build_parser().format_help()
    for title, group in groups():
        assert f"\n{title}:\n" in text
        for field in dataclasses.fields(group):
            assert flag_name(field) in text


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["some/model"], "engine.model.model", "some/model"),
        (["--model", "x"], "engine.model.model", "x"),
        (["--max-model-len", "8k"], "engine.model.max_model_len", 8000),
        (["--max-model-len", "8K"], "engine.model.max_model_len", 8192),
        (["--max-model-len", "-1"], "engine.model.max_model_len", -1),
        (["--max-model-len=1.5k"], "engine.model.max_model_len", 1500),
        (["--max_num_seqs", "4"], "engine.scheduler.max_num_seqs", 4),
        (["--kv-cache-memory", "2GiB"], "engine.cache.kv_cache_memory_bytes", 2 << 30),
        (["--kv-cache-memory-bytes", "1000"], "engine.cache.kv_cache_memory_bytes", 1000),
        (["--no-enable-prefix-caching"], "engine.cache.enable_prefix_caching", False),
        (["--no-async-scheduling"], "engine.scheduler.async_scheduling", False),
        (["--disable-log-stats"], "server.disable_log_stats", True),
        (["--served-model-name", "a", "b"], "engine.model.served_model_name", ("a", "b")),
        (["--api-key", "a", "--api-key", "b"], "server.api_key", ("a", "b")),
        (["--allowed-origins", '["*"]'], "server.allowed_origins", ("*",)),
        (
            ["--override-generation-config", '{"temperature": 0.5}'],
            "engine.model.override_generation_config",
            {"temperature": 0.5},
        ),
        (["--watermark", "0.1"], "engine.scheduler.watermark", 0.1),
        (["--dtype", "bfloat16"], "engine.model.dtype", "bfloat16"),
    ],
)
def test_flags_set_their_setting_and_nothing_else(argv: list[str], path: str, value: object) -> None:
    found: object = config_of(*argv)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-modl-len", "3"], ["--max-modl-len", "did you mean --max-model-len"]),
        (["--nonsense"], ["--nonsense", "--help"]),
        (["--tensor-parallel-size", "2"], ["unknown flag --tensor-parallel-size", "one replica on one machine"]),
        (["m", "--data_parallel_size=2"], ["unknown flag --data-parallel-size", "one replica on one machine"]),
        (["--trust-remote-code"], ["unknown flag --trust-remote-code", "never run"]),
        (["--quantization", "awq"], ["unknown flag --quantization", ".gguf"]),
        (["--enable-lora"], ["unknown flag --enable-lora", "merge the adapter"]),
        (["run-batch", "-o", "x"], ["-i/--input-file"]),
        (["run-batch", "-i", "/none", "-o", "x"], ["--input-file /none is not a file"]),
        (["run-batch", "-i", "x", "-o", "x", "--port", "70000"], ["--port", "65535"]),
        (["--max-json-depth", "100000"], ["--max-json-depth", "500"]),
        (["--max-stop", "-1"], ["--max-stop", "0 or more"]),
        (["--max-n", "0"], ["--max-n", "at least 1"]),
        (["--device", "cpu"], ["unknown flag --device", "CPU"]),
        (["--max-model-len", "3x"], ["--max-model-len", "3x", "8k"]),
        (["--max-model-len", "1.5"], ["--max-model-len", "1.5"]),
        (["--kv-cache-memory", "2XB"], ["--kv-cache-memory-bytes", "GiB"]),
        (["--port"], ["--port"]),
        (["--port", "x"], ["--port", "whole number"]),
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--block-size", "17"], ["--block-size", "17", "multiple of 16"]),
        (["--gpu-memory-utilization", "2"], ["--gpu-memory-utilization", "2"]),
        (["--override-generation-config", "{"], ["--override-generation-config", "JSON"]),
        (["--override-generation-config", "[]"], ["--override-generation-config", "object"]),
        (["--override-generation-config", '{"temperature": NaN}'], ["NaN"]),
        (["--override-generation-config", '{"temperature": 1e999}'], ["--override-generation-config", "temperature"]),
        (["--override-generation-config", '{"top_p": 0}'], ["--override-generation-config", "top_p", "(0, 1]"]),
        (["--override-generation-config", '{"x":' + "[" * 5000], ["--override-generation-config", "deep"]),
        (["--seed", "9" * 30], ["--seed", "64 bits"]),
        (["--max-model-len", "9" * 30], ["--max-model-len", "64 bits"]),
        (["--kv-cache-memory", "99999999999TiB"], ["--kv-cache-memory-bytes", "64 bits"]),
        (["--timeout-keep-alive", "-1"], ["--timeout-keep-alive -1"]),
        (["--metrics-prefix", "a b"], ["--metrics-prefix 'a b'"]),
        (["--root-path", "api"], ["--root-path 'api'", "/"]),
        (["--api-key", ""], ["--api-key ''", "not empty"]),
        (["--api-key", "k", " "], ["--api-key ''", "not empty"]),
        (["--served-model-name", ""], ["--served-model-name ''"]),
        ([""], ["--model ''"]),
        (["--tool-call-parser", "foo"], ["--tool-call-parser foo", "hermes", "none"]),
        (["--reasoning-parser", "foo"], ["--reasoning-parser foo", "qwen3", "none"]),
        (["a", "b"], ["'b'", "one too many"]),
        (["a", "--model", "b"], ["differ"]),
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--api-key", "--allow-unauthenticated"]),
        (["--dev-mode", "--host", "0.0.0.0"], ["--dev-mode", "loopback"]),
        (["--ssl-keyfile", "k"], ["--ssl-certfile", "--ssl-keyfile"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("serve: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_version_and_help_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("serve ")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "serve pull [--revision REVISION] MODEL" in capsys.readouterr().out


def test_help_shows_defaults_as_they_are_typed_and_the_environment() -> None:
    text = " ".join(build_parser().format_help().split())
    for shown in (
        "CORS methods (default: *)",
        "reuse blocks of equal prefixes (default: on)",
        "accept chat_template in requests (default: off)",
        "share of blocks kept free when admitting (default: 0.0)",
        "default: up to 512 on the CPU",
        "default: 128 on the CPU, at most --max-num-batched-tokens",
    ):
        assert shown in text
    for name in ("SERVE_CACHE_DIR", "SERVE_API_KEY", "SERVE_ENGINE_READY_TIMEOUT", "HF_HUB_OFFLINE", "NO_COLOR"):
        assert name in text
    assert "True" not in text
    assert "('" not in text


def test_hints_are_for_flags_that_do_not_exist() -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert not known & FOREIGN_FLAGS.keys()


def test_arguments_are_checked_without_loading_anything_slow() -> None:
    code = (
        "import sys; from serve.entrypoints.cli import main; code = main(['--block-size', '17']); "
        "slow = {'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'tokenizers', 'numpy'} & set(sys.modules); "
        "sys.exit(f'loaded {slow}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr


def test_port_in_use_is_one_line_and_exit_code_4() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        begin = time.monotonic()
        done = serve("--port", str(taken.getsockname()[1]))
        seconds = time.monotonic() - begin
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "in use" in done.stderr
    assert seconds < 20


def test_missing_model_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    done = serve(str(tmp_path / "nothing"), "--port", "0", env={"SERVE_IPC_DIR": str(tmp_path)})
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "nothing" in done.stderr
    assert not list(tmp_path.iterdir())


def test_broken_model_folder_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = serve(str(tmp_path), "--port", "0")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "config.json" in done.stderr


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("12", 12), ("2m", 2_000_000), ("2M", 2 << 20), ("-3", -3)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("5B", 5), ("1KB", 1000), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("2G", 2 << 30), ("7", 7)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "1kB", "1 2", "1e3", "0.5", "1KiBB", "NaN"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_unknown_flag_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown flag --x"):
        parse_flags(build_parser(), ["--x"])
