"""Decides early whether the MODEL argument is on this machine, must be fetched, or is a mistake."""

from __future__ import annotations

import difflib
import re
from typing import Final

from serve.config import Environment
from serve.errors import ConfigError, ExitCode
from serve.model_store import NAMED_MODELS, is_hub_id, list_models, local_path, resolve_model

COMMANDS: Final = ("pull", "run-batch")
# What may have been meant as a command: no path, and not the name of a file.
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def needs_download(model: str, environment: Environment) -> bool:
    """Tell whether finding the model may take a network; a missing path is not worth asking for."""
    if local_path(model) is not None:
        return False
    named = {listed.name: listed.is_cached for listed in list_models(environment)}
    if model.lower() in named:
        return not named[model.lower()]
    return is_hub_id(model)


def check_model_argument(model: str, environment: Environment) -> None:
    """Raise ConfigError at once for a model that is neither here nor anywhere to be fetched from."""
    if _WORD.fullmatch(model) and local_path(model) is None and model.lower() not in NAMED_MODELS:
        raise _no_such_word(model)
    if not needs_download(model, environment):
        resolve_model(model, None, environment)


def _no_such_word(word: str) -> ConfigError:
    close = difflib.get_close_matches(word.lower(), (*COMMANDS, *NAMED_MODELS), n=2, cutoff=0.6)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return ConfigError(
        f"no such command or model: {word!r}{hint}; commands: {', '.join(COMMANDS)}; a model is a file or folder, "
        f"a hub id owner/name, or one of {', '.join(NAMED_MODELS)}",
        ExitCode.MODEL,
    )
