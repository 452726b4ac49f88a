"""Loads a tokenizer from a checkpoint folder: tokenizer.json, its configuration and its chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError, ExitCode
from serve.renderers.backend import LibraryErrors, TokenizerParts
from serve.renderers.tokenizer_fallback import load_with_transformers

_MAX_CONFIG_BYTES: Final = 64 << 20
_TEMPLATE_DIR: Final = "additional_chat_templates"
_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# What transformers can turn into a tokenizer when there is no tokenizer.json.
_FALLBACK_FILES: Final = ("tokenizer.model", "spiece.model", "vocab.json", "tiktoken.model", "tekken.json")


def load_folder(folder: Path) -> TokenizerParts:
    """Load the tokenizer of a folder. Raises ConfigError (exit code MODEL) when there is none or it is broken.

    Which special tokens a text gets is tokenizer.json's affair; add_bos_token in the configuration does not count,
    as in transformers.
    """
    config = _read_json(folder / "tokenizer_config.json")
    json_file = folder / "tokenizer.json"
    if json_file.is_file():
        with LibraryErrors(f"{json_file.name} cannot be used as a tokenizer"):
            backend = Backend.from_file(str(json_file))
    elif any((folder / name).is_file() for name in _FALLBACK_FILES):
        backend = load_with_transformers(folder)
    else:
        raise ConfigError(
            f"no tokenizer in {folder}: neither tokenizer.json nor {', '.join(_FALLBACK_FILES)} is there; "
            "pass --tokenizer with a folder that has one",
            ExitCode.MODEL,
        )
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    with LibraryErrors(f"the special tokens of {folder.name} cannot be used"):
        _add_tokens(backend, config, special)
    return TokenizerParts(backend=backend, special_tokens=special, chat_template=_chat_templates(folder, config))


def _read_text(file: Path) -> str | None:
    if not file.is_file():
        return None
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{file.name} is larger than {_MAX_CONFIG_BYTES >> 20} MiB", ExitCode.MODEL)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file.name} cannot be read: {error}", ExitCode.MODEL) from None


def _read_json(file: Path) -> dict[str, object]:
    """Give a JSON object file, {} when the file is missing."""
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.name} is not JSON: {error}", ExitCode.MODEL) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file.name} is not a JSON object", ExitCode.MODEL)
    return value


def _token_text(value: object) -> str | None:
    """Give a token's text, written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Find the named tokens: the usual names, and those that the model adds (image_token ...)."""
    extra = config.get("extra_special_tokens")
    listed = {**(extra if isinstance(extra, dict) else {}), **{name: config.get(name) for name in _SPECIAL_NAMES}}
    found = ((str(name), _token_text(value)) for name, value in listed.items())
    return {name: text for name, text in found if text is not None}


def _add_tokens(backend: Backend, config: dict[str, object], special: dict[str, str]) -> None:
    """Add tokens that only tokenizer_config.json lists, and mark the named ones as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        missing = []
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]) if str(item[0]).isdigit() else 0):
            text = _token_text(entry)
            if text is not None and text not in known:
                missing.append(_added_token(text, entry))
        backend.add_tokens(missing)
        known.update((token.content, token) for token in missing)
    named = [text for text in dict.fromkeys(special.values()) if text not in known or not known[text].special]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in named if backend.token_to_id(text) is not None]
    )


def _added_token(text: str, entry: object) -> AddedToken:
    given = entry if isinstance(entry, dict) else {}
    flags = {name: given.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(text, **flags)


def _chat_templates(folder: Path, config: dict[str, object]) -> str | dict[str, str] | None:
    """Find the chat template: chat_template.jinja, else the configuration's, else chat_template.json."""
    main: object = _read_text(folder / "chat_template.jinja")
    if main is None:
        main = config.get("chat_template")
    if main is None:
        main = _read_json(folder / "chat_template.json").get("chat_template")
    named = _named_templates(main)
    extra = folder / _TEMPLATE_DIR
    if extra.is_dir():
        for file in sorted(extra.glob("*.jinja")):
            named[file.stem] = _read_text(file) or ""
    if not named:
        return None
    return named["default"] if named.keys() == {"default"} else named


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    found = {}
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            found[entry["name"]] = entry["template"]
    return found
