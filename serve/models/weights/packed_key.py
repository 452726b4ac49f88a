"""The name of a checkpoint's packed weights: it changes with all that they depend on."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from serve import __version__
from serve.checkpoint import Checkpoint

_FRONT_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 4096
_NUM_SAMPLES: Final = 64
# File systems stamp changes with a clock that moves in steps of up to 10 ms. A file younger than this could change
# once more under the same stamp.
_SETTLED_NS: Final = 100_000_000
_PACKAGE: Final = Path(__file__).resolve().parents[2]
_CODE_FOLDERS: Final = ("kernels", "models")
_CODE_SUFFIXES: Final = (".py", ".so")


def packed_weights_key(
    checkpoint: Checkpoint, dtype: str, device: torch.device, *, now_ns: Callable[[], int] = time.time_ns
) -> str | None:
    """Give the key of a checkpoint's weights as this program packs them, None when a file has just been written.

    It covers the weight files, the description of the model, --dtype and the program's own code. A file
    counts as the same while its size, inode, times of change and a sample of its bytes are. The system stamps every
    write with the time of change, and no program can set that back; the sample is for file systems put together anew.
    Raises OSError when a file cannot be read.
    """
    digest = hashlib.sha256(f"{__version__} {dtype} {device.type} ".encode())
    digest.update(_code_digest())
    description = replace(checkpoint, name="", root="", weight_files=(), generation_defaults={})
    digest.update(repr(description).encode())
    for file in checkpoint.weight_files:
        state = os.stat(file)
        if now_ns() - max(state.st_mtime_ns, state.st_ctime_ns) < _SETTLED_NS:
            return None
        digest.update(f"{state.st_size} {state.st_ino} {state.st_mtime_ns} {state.st_ctime_ns} ".encode())
        _add_sample(digest, file, state.st_size)
    return digest.hexdigest()


def _code_digest() -> bytes:
    """Give a digest of the code that packs weights and reads them: a change of either makes old files useless."""
    digest = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        for path in sorted((_PACKAGE / folder).rglob("*")):
            if path.suffix in _CODE_SUFFIXES:
                digest.update(f"{path.relative_to(_PACKAGE)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    return digest.digest()


def _add_sample(digest: hashlib._Hash, path: str, size: int) -> None:
    """Add the file's start, where formats have their header, and pieces at even distances up to its end."""
    with open(path, "rb") as file:
        digest.update(file.read(_FRONT_BYTES))
        for index in range(1, _NUM_SAMPLES + 1):
            begin = max(0, size - _SAMPLE_BYTES) * index // _NUM_SAMPLES
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, begin))
