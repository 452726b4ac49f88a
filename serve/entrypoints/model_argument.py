"""Decides early whether the MODEL argument is on this machine, must be fetched, or is a mistake."""

from __future__ import annotations

from serve.config import Environment
from serve.model_store import is_hub_id, list_models, local_path, resolve_model


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
    if not needs_download(model, environment):
        resolve_model(model, None, environment)
