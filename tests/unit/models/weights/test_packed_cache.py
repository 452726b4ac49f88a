"""The folder of packed weights: what is kept, what goes, and that trouble costs a line of the log and nothing else."""

from __future__ import annotations

import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import ModelConfig
from serve.kernels.packed_weight import PackedWeight
from serve.models.weights.packed_cache import MIN_WEIGHT_BYTES, CacheEntry, PackedWeightsCache, open_cache_entry
from serve.models.weights.packed_file import PackedMatrix

CPU = torch.device("cpu")
ARCH = ModelArch("LlamaForCausalLM", 100, 64, 128, 2, 4, 2, 16, 1e-5, 512, 1e4)
WEIGHTS = PackedWeight(torch.arange(16 * 1024, dtype=torch.float32).view(1, 1024, 16), 16, 1024)
MATRICES: dict[str, tuple[PackedMatrix, ...]] = {"layer": (WEIGHTS,)}
# A page before the payload, then 64 KiB.
FILE_BYTES = 4096 + 65536


@pytest.fixture
def cache(tmp_path: Path) -> PackedWeightsCache:
    return PackedWeightsCache(tmp_path / "packed", 1 << 20, min_free_bytes=0)


def entry(cache: PackedWeightsCache, key: str = "key") -> CacheEntry:
    return CacheEntry(cache, key, lambda: key)


def finish(entry: CacheEntry) -> None:
    """End a load and wait until what it packed is stored."""
    thread = entry.finish()
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def load(cache: PackedWeightsCache, key: str = "key") -> bool:
    """Load as the loader does; True when the weights came from the folder."""
    loading = entry(cache, key)
    found = loading.take("layer")
    if found is None:
        loading.keep("layer", (WEIGHTS,))
    else:
        assert torch.equal(found[0].data, WEIGHTS.data)
    finish(loading)
    return found is not None


def names(cache: PackedWeightsCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir() if path.name != ".lock")


def test_the_second_load_takes_what_the_first_one_packed(
    cache: PackedWeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not load(cache)
    assert "packed weights: stored for the next start" in caplog.text
    assert "mapped" not in caplog.text
    assert load(cache)
    assert "packed weights: mapped" in caplog.text
    assert names(cache) == ["key.packed"]


def test_keys_are_apart(cache: PackedWeightsCache) -> None:
    assert not load(cache, "a")
    assert not load(cache, "b")
    assert names(cache) == ["a.packed", "b.packed"]


def test_a_matrix_that_is_not_in_the_file_is_packed(cache: PackedWeightsCache) -> None:
    load(cache)
    assert entry(cache).take("other") is None


@pytest.mark.parametrize("place", [5, -5])
def test_a_damaged_file_is_replaced_and_said_so(
    cache: PackedWeightsCache, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """5 is in the head, -5 in the payload."""
    load(cache)
    raw = bytearray(cache.path("key").read_bytes())
    raw[place] ^= 0x10
    cache.path("key").write_bytes(raw)
    assert not load(cache)
    assert "packed weights are useless, packing anew" in caplog.text
    assert load(cache)


def test_a_file_of_another_key_is_not_taken_for_this_one(cache: PackedWeightsCache) -> None:
    load(cache, "a")
    cache.path("a").rename(cache.path("b"))
    assert not load(cache, "b")


def test_many_writers_at_once_leave_one_sound_file(tmp_path: Path) -> None:
    caches = [PackedWeightsCache(tmp_path / "packed", 1 << 20, min_free_bytes=0) for _ in range(8)]
    together = threading.Barrier(len(caches))
    written: list[bool] = []

    def store(cache: PackedWeightsCache) -> None:
        together.wait(30)
        written.append(cache.store("key", MATRICES))

    threads = [threading.Thread(target=store, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(written) == [False] * 7 + [True]
    assert names(caches[0]) == ["key.packed"]
    assert load(caches[0])


def test_what_a_killed_writer_left_goes_with_the_next_store(cache: PackedWeightsCache) -> None:
    cache.folder.mkdir()
    (cache.folder / "half.part").write_bytes(b"SERVEPKW")
    assert not load(cache)
    assert names(cache) == ["key.packed"]


def test_a_bound_keeps_the_files_used_last(tmp_path: Path) -> None:
    cache = PackedWeightsCache(tmp_path, 3 * FILE_BYTES, min_free_bytes=0)
    for index, key in enumerate("abc"):
        assert not load(cache, key)
        os.utime(cache.path(key), (index, index))
    assert load(cache, "a")  # the oldest is now the youngest
    assert not load(cache, "d")
    assert names(cache) == ["a.packed", "c.packed", "d.packed"]


def test_a_removed_file_stays_with_who_has_it_mapped(tmp_path: Path) -> None:
    cache = PackedWeightsCache(tmp_path, FILE_BYTES, min_free_bytes=0)
    load(cache, "a")
    found = entry(cache, "a").take("layer")
    load(cache, "b")
    assert names(cache) == ["b.packed"]
    assert found is not None
    assert torch.equal(found[0].data, WEIGHTS.data)


def test_weights_beyond_the_bound_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = PackedWeightsCache(tmp_path, FILE_BYTES - 1, min_free_bytes=0)
    load(cache)
    assert names(cache) == []
    assert "--packed-weights-cache-bytes allows" in caplog.text


def test_nothing_is_removed_in_vain(tmp_path: Path) -> None:
    load(PackedWeightsCache(tmp_path, 1 << 20, min_free_bytes=0), "a")
    full = PackedWeightsCache(tmp_path, FILE_BYTES, min_free_bytes=1 << 60)
    load(full, "b")
    assert names(full) == ["a.packed"]


def test_a_file_is_as_readable_as_its_folder(cache: PackedWeightsCache) -> None:
    cache.folder.mkdir(mode=0o755)
    cache.folder.chmod(0o755)
    load(cache)
    assert stat.S_IMODE(cache.path("key").stat().st_mode) == 0o644


def test_a_disk_is_never_filled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PackedWeightsCache(tmp_path, 1 << 20, min_free_bytes=1 << 60)
    load(cache)
    assert names(cache) == []
    assert "must stay so" in caplog.text
    assert "SERVE_CACHE_DIR" in caplog.text


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses to write beyond 20,000 bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_is_full_costs_a_line_and_leaves_nothing(
    cache: PackedWeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    assert not load(cache)
    assert names(cache) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "File too large" in caplog.text


def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Root may write to read-only folders, so the folder's place is taken by a file."""
    (tmp_path / "packed").write_text("")
    assert not load(PackedWeightsCache(tmp_path / "packed", 1 << 20, min_free_bytes=0))
    assert "packed weights are not kept" in caplog.text


def test_a_file_that_cannot_be_read_costs_a_line(cache: PackedWeightsCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path("key").mkdir(parents=True)
    assert not load(cache)
    assert "cannot be read" in caplog.text


def test_weights_of_files_that_changed_meanwhile_are_not_kept(
    cache: PackedWeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    loading = CacheEntry(cache, "key", lambda: "another")
    loading.keep("layer", (WEIGHTS,))
    finish(loading)
    assert "changed while they were loaded" in caplog.text
    assert not cache.path("key").exists()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A checkpoint just large enough, of holes; its key is not asked for within the first moment after writing."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as sink:
        sink.truncate(MIN_WEIGHT_BYTES)
    return Checkpoint("m", str(tmp_path), "safetensors", (str(file),), ARCH)


def test_small_checkpoints_and_switched_off_caches_have_no_entry(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def opened(checkpoint: Checkpoint, config: ModelConfig, folder: Path | None = tmp_path) -> CacheEntry | None:
        return open_cache_entry(checkpoint, config, folder, device=CPU, now_ns=lambda: 1 << 62)

    config = ModelConfig()
    assert opened(checkpoint, config) is not None
    assert opened(checkpoint, config, None) is None
    assert opened(checkpoint, replace(config, packed_weights_cache_bytes=0)) is None
    assert opened(checkpoint, replace(config, load_format="dummy")) is None
    assert opened(replace(checkpoint, weight_files=("/nowhere",)), config) is None
    os.truncate(checkpoint.weight_files[0], MIN_WEIGHT_BYTES - 1)
    assert opened(checkpoint, config) is None


def test_a_checkpoint_just_written_has_no_entry(checkpoint: Checkpoint, tmp_path: Path) -> None:
    changed = os.stat(checkpoint.weight_files[0]).st_ctime_ns
    config = ModelConfig()
    assert open_cache_entry(checkpoint, config, tmp_path, device=CPU, now_ns=lambda: changed) is None
