"""Checks of settings that need a file but not the engine, so that a mistake ends the start at once."""

from __future__ import annotations

from pathlib import PurePath

from serve.checkpoint.runner import describe_model
from serve.config import EngineConfig, Environment
from serve.entrypoints.model_argument import needs_download
from serve.errors import ConfigError, InvalidRequest
from serve.model_store import resolve_model
from serve.renderers.chat_template import ChatTemplate, load_chat_template, make_environment


def check_chat_template(value: str) -> None:
    """Raise ConfigError for a --chat-template whose file cannot be read or whose text is no template.

    A bare word is left alone: only the tokenizer, loaded later, knows whether it has a template of that name.
    """
    is_text = "{" in value
    if not is_text and not PurePath(value).suffix and len(PurePath(value).parts) == 1:
        return
    text = load_chat_template(value, None)
    assert text is not None, "a value gives a text or an error"
    try:
        ChatTemplate(make_environment(), text)
    except InvalidRequest as error:
        shown = "" if is_text else f" {value}"
        raise ConfigError(f"--chat-template{shown}: {error}") from None


def check_against_model(config: EngineConfig, environment: Environment) -> None:
    """Raise ConfigError for settings that contradict a model which is on this machine already."""
    model = config.model
    if needs_download(model.model, environment):
        return
    path = resolve_model(model.model, model.revision, environment)
    describe_model(path, config)
