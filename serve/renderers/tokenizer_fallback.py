"""Loads tokenizers that have no tokenizer.json, with transformers; nothing else in the server imports it."""

from __future__ import annotations

import importlib
from pathlib import Path

from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError, ExitCode


def load_with_transformers(folder: Path) -> Backend:
    """Let transformers convert a folder's tokenizer files and give the converted tokenizer.

    Takes seconds, since transformers loads torch. Never runs code from the folder. Raises ConfigError when
    transformers is not installed or cannot convert the files.
    """
    try:
        # Not at the top of the file: this import costs seconds and most checkpoints never need it.
        auto = importlib.import_module("transformers").AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"{folder} has no tokenizer.json, and converting its other tokenizer files needs transformers; "
            "install it with `pip install serve[transformers]`, or pass --tokenizer with a folder that has a "
            "tokenizer.json",
            ExitCode.MODEL,
        ) from None
    try:
        tokenizer = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, ImportError, LookupError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load the tokenizer of {folder}: {error}", ExitCode.MODEL) from error
    backend: object = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"transformers has no fast form of the tokenizer of {folder} ({type(tokenizer).__name__}); "
            "pass --tokenizer with a folder that has a tokenizer.json",
            ExitCode.MODEL,
        )
    return backend
