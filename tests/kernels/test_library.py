"""Loading, choosing and sharing the CPU library, and what happens without one."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.cpu import binding
from tests.kernels.paged import Heads, make_batch
from tests.kernels.variants import VARIANTS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    """Let the test choose the library anew, and undo that afterwards."""
    binding.load_library.cache_clear()
    ops.implementation.cache_clear()
    yield None
    binding.load_library.cache_clear()
    ops.implementation.cache_clear()


def test_description_names_the_build_and_the_threads(fresh_choice: None) -> None:
    assert ops.set_num_threads(2) == 2
    variant = binding.load_library().variant
    assert variant in {name for name, _ in binding.VARIANTS}
    assert ops.library_description() == f"cpu kernels: {variant}, 2 threads"
    assert ops.set_num_threads(1) == 1
    assert ops.library_description() == f"cpu kernels: {variant}, 1 thread"


@pytest.mark.parametrize("num_threads", [0, -1, 257])
def test_impossible_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=rf"num_threads={num_threads} is outside 1\.\.256"):
        ops.set_num_threads(num_threads)


def test_without_a_library_the_twins_run(fresh_choice: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    assert ops.implementation("cpu") is reference
    assert ops.library_description() == (
        "plain torch (built without a C++ compiler; install g++ and reinstall serve for speed)"
    )
    assert ops.set_num_threads(2) == 2
    x = torch.randn(2, 24)
    assert torch.equal(ops.rms_norm(x, torch.ones(24), 1e-5), reference.rms_norm(x, torch.ones(24), 1e-5))


def test_damaged_library_is_named_and_not_used(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve_cpu_portable.so").write_bytes(b"no library")
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    assert ops.implementation("cpu") is reference
    assert ops.library_description().startswith("plain torch (library does not load: ")


def test_library_of_another_version_is_named_and_not_used(fresh_choice: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "ABI_VERSION", binding.ABI_VERSION + 1)
    assert ops.implementation("cpu") is reference
    assert ".so has version" in ops.library_description()


def test_broken_build_gives_way_to_the_next_best_with_a_warning(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(binding.FOLDER / "serve_cpu_portable.so", tmp_path)
    for name, _ in binding.VARIANTS[:-1]:
        (tmp_path / f"serve_cpu_{name}.so").write_bytes(b"no library")
    monkeypatch.setattr(binding, "FOLDER", tmp_path)
    monkeypatch.setattr(logging.getLogger("serve"), "propagate", True)
    assert binding.load_library().variant == "portable"
    # A processor that runs nothing but the portable build never looked at the broken ones.
    assert len(VARIANTS) == 1 or "the portable build is used" in caplog.text


def test_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels for device 'meta'; supported: cpu"):
        ops.silu_and_mul(torch.empty(2, 4, device="meta"))


def test_callers_in_several_python_threads_get_right_results() -> None:
    ops.set_num_threads(3)
    batch = make_batch([64, 1], [600, 900], Heads(9, 3, 64), dtype=torch.bfloat16)
    expected = torch.empty_like(batch.query)
    ops.paged_attention(batch.query, batch.cache, batch.meta, expected, scale=batch.heads.scale)
    wrong: list[int] = []

    def call_often(caller: int) -> None:
        for _ in range(20):
            out = torch.full_like(batch.query, torch.nan)
            ops.paged_attention(batch.query, batch.cache, batch.meta, out, scale=batch.heads.scale)
            if not torch.equal(out, expected):
                wrong.append(caller)

    callers = [threading.Thread(target=call_often, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    ops.set_num_threads(1)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def run_build(tmp_path: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """Run the build step on a copy of the sources that has no library yet."""
    sources = tmp_path / "serve" / "kernels" / "cpu"
    shutil.copytree(binding.FOLDER, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", tmp_path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "build_kernels", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_missing_compiler_does_not_fail_the_install(tmp_path: Path) -> None:
    done = run_build(tmp_path, "/nonexistent/c++")
    assert done.returncode == 0, done.stderr
    assert "/nonexistent/c++ does not run" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []


def test_failing_compiler_is_quoted_and_does_not_fail_the_install(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'no such standard' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run_build(tmp_path, str(compiler))
    assert done.returncode == 0, done.stderr
    assert "the portable build failed:\nno such standard" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []
