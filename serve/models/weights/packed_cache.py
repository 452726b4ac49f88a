"""Packed weights kept on disk between starts, so that a start maps them instead of packing, and servers share them.

A folder holds a file for each key (packed_key.py). Files appear by one rename, are never changed and go by least
recent use, so a server that has one mapped keeps it whatever happens. All trouble with the folder costs one line of
the log and the speed of the next start, nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from serve.checkpoint import Checkpoint
from serve.config import ModelConfig
from serve.models.weights.packed_file import (
    DamagedFile,
    PackedFile,
    PackedLayout,
    PackedMatrix,
    lay_out,
)
from serve.models.weights.packed_key import packed_weights_key

log = logging.getLogger(__name__)

# Below this, packing takes less than a tenth of a second.
MIN_WEIGHT_BYTES: Final = 32 << 20
# What the disk keeps free.
MIN_FREE_BYTES: Final = 2 << 30
_SUFFIX: Final = ".packed"
_READABLE: Final = 0o644
_PART_SUFFIX: Final = ".part"
_LOCK_NAME: Final = ".lock"
_MIB: Final = 1 << 20


class PackedWeightsCache:
    """The folder. max_bytes bounds the sizes of its files together."""

    def __init__(self, folder: Path, max_bytes: int, *, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes

    def path(self, key: str) -> Path:
        """Give the place of a key's file."""
        return self.folder / f"{key}{_SUFFIX}"

    def find(self, key: str) -> PackedFile | None:
        """Open the file of a key and note its use; None when there is no sound one. A damaged file is removed."""
        path = self.path(key)
        try:
            found = PackedFile(path, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("packed weights cannot be read: %s: %s; packing anew", path, error.strerror or error)
            return None
        except DamagedFile as error:
            self.discard(key, str(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def discard(self, key: str, reason: str) -> None:
        """Remove the file of a key, because of its content."""
        log.warning("packed weights are useless, packing anew: %s: %s", self.path(key), reason)
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    def store(self, key: str, matrices: Mapping[str, Sequence[PackedMatrix]]) -> bool:
        """Write the file of a key; False when it is there already, there is no room, or another server writes now.

        Raises OSError when the folder does not take it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock() as is_ours:
            if not is_ours or self.path(key).exists():
                return False
            for part in self.folder.glob(f"*{_PART_SUFFIX}"):
                part.unlink(missing_ok=True)  # the lock is ours, so nobody writes it any more
            layout = lay_out(key, matrices)
            if not self._make_room(layout.num_bytes):
                return False
            self._write(key, layout)
        return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Try to hold the folder's lock, which the system drops with the process; tells whether it is held."""
        with open(self.folder / _LOCK_NAME, "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("packed weights are not kept this time: another server writes to %s", self.folder)
                yield False
            else:
                yield True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove files by least recent use until so many bytes are within the bound and on the disk; none in vain."""
        if num_bytes > self._max_bytes:
            log.info(
                "packed weights are not kept: they have %d MiB, --packed-weights-cache-bytes allows %d",
                num_bytes // _MIB,
                self._max_bytes // _MIB,
            )
            return False
        states = sorted(((path.stat(), path) for path in self.folder.glob(f"*{_SUFFIX}")), key=lambda s: s[0].st_mtime)
        free = shutil.disk_usage(self.folder).free
        excess = max(
            sum(state.st_size for state, _ in states) + num_bytes - self._max_bytes,
            self._min_free_bytes + num_bytes - free,
        )
        victims: list[Path] = []
        for state, path in states:
            if excess <= 0:
                break
            victims.append(path)
            excess -= state.st_size
        if excess > 0:
            log.warning(
                "packed weights are not kept: %d MiB are free in %s, and %d must stay so beside their %d; free space "
                "there, set SERVE_CACHE_DIR to another folder, or pass --packed-weights-cache-bytes 0",
                free // _MIB,
                self.folder,
                self._min_free_bytes // _MIB,
                num_bytes // _MIB,
            )
            return False
        for path in victims:
            path.unlink(missing_ok=True)
            log.info("packed weights removed to make room: %s", path)
        return True

    def _write(self, key: str, layout: PackedLayout) -> None:
        """Write beside the final place and appear there complete."""
        handle, name = tempfile.mkstemp(suffix=_PART_SUFFIX, dir=self.folder)
        try:
            with open(handle, "wb") as sink:
                layout.write(sink)
                sink.flush()
                # As readable as the folder: servers of other users may share it.
                os.fchmod(handle, stat.S_IMODE(os.stat(self.folder).st_mode) & _READABLE)
                os.fsync(sink.fileno())
            os.replace(name, self.path(key))
        finally:
            # Under this name it is still there only when something failed.
            with contextlib.suppress(OSError):
                os.unlink(name)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class CacheEntry:
    """One checkpoint's weights in the cache, while a model is loaded from them.

    take and keep may be called from several threads.
    """

    def __init__(self, cache: PackedWeightsCache, key: str, current_key: Callable[[], str | None]) -> None:
        """Look the key up. current_key gives it anew once the weights are read: files may change meanwhile."""
        self._cache = cache
        self._key = key
        self._current_key = current_key
        self._file = cache.find(key)
        self._matrices: dict[str, tuple[PackedMatrix, ...]] = {}
        self._has_new = False

    def take(self, name: str) -> tuple[PackedMatrix, ...] | None:
        """Give the matrices kept under a name, None when they are to be packed."""
        if self._file is None:
            return None
        try:
            found = self._file.take(name)
        except DamagedFile as error:
            self._file = None
            self._cache.discard(self._key, str(error))
            return None
        if found is not None:
            self._matrices[name] = found
        return found

    def keep(self, name: str, matrices: tuple[PackedMatrix, ...]) -> None:
        """Note matrices that were packed, to be stored under the name."""
        self._matrices[name] = matrices
        self._has_new = True

    def finish(self) -> threading.Thread | None:
        """Say what was found; what was packed is stored by the thread that is given, behind the server's work."""
        if not self._has_new:
            if self._file is not None:
                log.info(
                    "packed weights: mapped %d MiB of %s", self._file.num_bytes // _MIB, self._cache.path(self._key)
                )
            return None
        thread = threading.Thread(target=self._store, name="packed-weights", daemon=True)
        thread.start()
        return thread

    def _store(self) -> None:
        began = time.monotonic()
        path = self._cache.path(self._key)
        try:
            if self._current_key() != self._key:
                log.warning("packed weights are not kept: the model's files changed while they were loaded")
                return
            if self._cache.store(self._key, self._matrices):
                seconds = time.monotonic() - began
                log.info("packed weights: stored for the next start in %.1f s as %s", seconds, path)
        except OSError as error:
            log.warning(
                "packed weights are not kept: %s: %s; free space there, set SERVE_CACHE_DIR to another folder, or pass "
                "--packed-weights-cache-bytes 0",
                self._cache.folder,
                error.strerror or error,
            )
        finally:
            self._matrices = {}


def open_cache_entry(
    checkpoint: Checkpoint,
    config: ModelConfig,
    folder: Path | None,
    *,
    device: torch.device,
    now_ns: Callable[[], int] = time.time_ns,
) -> CacheEntry | None:
    """Give the checkpoint's entry in a folder; None when nothing is to be kept: not asked for, or not worth it."""
    if folder is None or config.packed_weights_cache_bytes == 0 or config.load_format == "dummy":
        return None

    def key() -> str | None:
        return packed_weights_key(checkpoint, config.dtype, device, now_ns=now_ns)

    try:
        if sum(os.stat(file).st_size for file in checkpoint.weight_files) < MIN_WEIGHT_BYTES:
            return None
        now = key()
    except OSError:
        return None  # whoever opens the files says what is wrong with them
    if now is None:
        return None
    return CacheEntry(PackedWeightsCache(folder, config.packed_weights_cache_bytes), now, key)
