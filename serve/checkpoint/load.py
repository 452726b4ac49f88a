"""Finds out what kind of checkpoint a path is and reads its description."""

from __future__ import annotations

from pathlib import Path

from serve.checkpoint.arch import Checkpoint
from serve.checkpoint.fields import fail
from serve.checkpoint.folder import from_folder
from serve.checkpoint.gguf_file import from_gguf


def load_checkpoint(path: str | Path, *, name: str | None = None, need_weights: bool = True) -> Checkpoint:
    """Describe the model in a folder (safetensors, or a single .gguf) or in a .gguf file.

    name is what people called it (default: the path). need_weights=False accepts a folder without weight files, for
    dummy weights. Raises ConfigError (exit code MODEL) that names the file and what is wrong with it.
    """
    path = Path(path)
    name = name if name is not None else str(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            fail(path, "is a file but not .gguf; give a .gguf file or a folder with config.json and safetensors")
        return from_gguf(path, name)
    if not path.is_dir():
        fail(path, "does not exist")
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return from_gguf(ggufs[0], name)
        if ggufs:
            names = ", ".join(p.name for p in ggufs)
            fail(path, f"holds several .gguf files; name one of them: {names}")
        fail(path, "has no config.json and no .gguf file; it is not a model folder")
    return from_folder(path, name, need_weights)
