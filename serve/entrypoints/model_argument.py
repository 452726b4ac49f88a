"""Decides early whether the MODEL argument is on this machine, must be fetched, or is a mistake."""

from __future__ import annotations

from pathlib import Path

from serve.config import Environment
from serve.model_store import list_models, resolve_model


def needs_download(model: str, environment: Environment) -> bool:
    """Tell whether finding the model may take a network; a missing path is not worth asking for."""
    if Path(model).expanduser().exists():
        return False
    named = {listed.name: listed.is_cached for listed in list_models(environment)}
    if model.lower() in named:
        return not named[model.lower()]
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def check_model_argument(model: str, environment: Environment) -> None:
    """Raise ConfigError at once for a model that is neither here nor anywhere to be fetched from."""
    if not needs_download(model, environment):
        resolve_model(model, None, environment)
