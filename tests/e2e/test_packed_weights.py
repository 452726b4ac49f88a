"""Packed weights between starts of the server: kept, used again, and not used once the model's file has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from serve.config import read_environment
from serve.model_store import resolve_model
from tests.e2e.client import complete, text_of
from tests.e2e.server import Server, running
from tests.waiting import wait_until

FLAGS = ("--max-model-len", "256", "--kv-cache-memory", "64MiB")
STORED = "packed weights: stored for the next start"
MAPPED = "packed weights: mapped"


@pytest.fixture
def model(built_in_model: str, tmp_path: Path) -> Path:
    """The built-in model as a file of its own, which a test may change."""
    copy = tmp_path / "model.gguf"
    shutil.copyfile(resolve_model(built_in_model, None, read_environment()), copy)
    return copy


def answer(server: Server) -> str:
    return text_of(complete(server, "The capital of France is", max_tokens=8, temperature=0))


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "packed").glob("*.packed"))


def test_the_second_start_maps_what_the_first_one_stored_and_a_changed_model_is_packed_anew(
    model: Path, tmp_path: Path
) -> None:
    env = {"SERVE_CACHE_DIR": str(tmp_path / "cache")}
    with running(*FLAGS, model=str(model), env=env) as first:
        wait_until(lambda: STORED in first.log(), 30, "the packed weights are stored")
        text = answer(first)
        # A second server beside the first one: from here on both can share the pages.
        with running(*FLAGS, model=str(model), env=env) as second:
            assert MAPPED in second.log()
            assert answer(second) == text
            shared = [m for m in second.engine_core().memory_maps(grouped=False) if m.path.endswith(".packed")]
            assert sum(m.rss for m in shared) > 90 << 20
    assert len(stored(tmp_path / "cache")) == 1
    with model.open("r+b") as file:
        file.write(b"GGUF")  # the same bytes, and yet a write
    os.utime(model, (0, 0))
    with running(*FLAGS, model=str(model), env=env) as third:
        assert MAPPED not in third.log()
        wait_until(lambda: STORED in third.log(), 30, "the packed weights are stored")
        assert answer(third) == text
    assert len(stored(tmp_path / "cache")) == 2


def test_a_start_without_the_cache_leaves_no_file(model: Path, tmp_path: Path) -> None:
    env = {"SERVE_CACHE_DIR": str(tmp_path / "cache")}
    with running(*FLAGS, "--packed-weights-cache-bytes", "0", model=str(model), env=env) as server:
        assert answer(server)
        assert "packed weights" not in server.log()
    assert not (tmp_path / "cache" / "packed").exists()
