"""The key of packed weights changes with everything they depend on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.checkpoint import Checkpoint, ModelArch
from serve.models.weights.packed_key import packed_weights_key

CPU = torch.device("cpu")
ARCH = ModelArch("LlamaForCausalLM", 100, 64, 128, 2, 4, 2, 16, 1e-5, 512, 1e4)
SIZE = 3 << 20


def later() -> int:
    """Give a time at which the files of a test are old."""
    return 1 << 62


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    return Checkpoint("m", str(tmp_path), "safetensors", (str(file),), ARCH)


def key(checkpoint: Checkpoint, dtype: str = "auto") -> str:
    found = packed_weights_key(checkpoint, dtype, CPU, now_ns=later)
    assert found is not None
    return found


def test_the_key_is_stable_and_fit_for_a_file_name(checkpoint: Checkpoint) -> None:
    first = key(checkpoint)
    assert key(checkpoint) == first
    assert first.isalnum()


def test_another_name_for_the_same_files_gives_the_same_key(checkpoint: Checkpoint, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(checkpoint.weight_files[0])
    assert key(replace(checkpoint, name="other", root="/elsewhere", weight_files=(str(link),))) == key(checkpoint)


@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_a_change_in_place_with_its_time_put_back_gives_another_key(checkpoint: Checkpoint, place: int) -> None:
    """mtime can be set to anything; the time of the last change of the file's description cannot."""
    path = Path(checkpoint.weight_files[0])
    before, state = key(checkpoint), path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns
    assert key(checkpoint) != before


def test_a_copy_is_another_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(checkpoint.weight_files[0]).read_bytes())
    assert key(replace(checkpoint, weight_files=(str(copy),))) != key(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, arch=replace(c.arch, num_heads=8)),
        lambda c: replace(c, arch=replace(c.arch, tie_word_embeddings=True)),
        lambda c: replace(c, format="gguf"),
        lambda c: replace(c, weight_files=c.weight_files * 2),
    ],
)
def test_what_the_model_is_belongs_to_the_key(
    checkpoint: Checkpoint, change: Callable[[Checkpoint], Checkpoint]
) -> None:
    assert key(change(checkpoint)) != key(checkpoint)


def test_the_compute_type_belongs_to_the_key(checkpoint: Checkpoint) -> None:
    assert key(checkpoint, "bfloat16") != key(checkpoint)


def test_what_does_not_touch_the_weights_is_not_in_the_key(checkpoint: Checkpoint) -> None:
    assert key(replace(checkpoint, generation_defaults={"temperature": 0.3})) == key(checkpoint)


def test_a_file_that_was_just_written_has_no_key_yet(checkpoint: Checkpoint) -> None:
    """It may change again within the same tick of the clock that stamps files."""
    changed = Path(checkpoint.weight_files[0]).stat().st_ctime_ns
    assert packed_weights_key(checkpoint, "auto", CPU, now_ns=lambda: changed + 50_000_000) is None
    assert packed_weights_key(checkpoint, "auto", CPU, now_ns=lambda: changed + 150_000_000) is not None


def test_a_missing_file_is_an_os_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(FileNotFoundError):
        packed_weights_key(replace(checkpoint, weight_files=("/nowhere",)), "auto", CPU)
