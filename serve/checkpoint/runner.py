"""Joins what a checkpoint is with what the operator wants of it: --runner, --convert and --pooler-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from serve.checkpoint.arch import Checkpoint, PoolerConfig, PoolingType
from serve.checkpoint.fields import Fields, read_json
from serve.checkpoint.load import load_checkpoint
from serve.checkpoint.pooling import class_pooler, embed_pooler
from serve.config import EngineConfig, ModelConfig, resolve
from serve.errors import ConfigError

_POOLING_TYPES: Final[dict[str, PoolingType]] = {"cls": "cls", "last": "last", "mean": "mean"}
_POOLER_KEYS: Final = ("pooling_type", "normalize", "use_activation", "is_matryoshka")


def describe_model(path: str | Path, config: EngineConfig) -> tuple[Checkpoint, EngineConfig]:
    """Read the checkpoint at a path and give it, made ready for the wanted runner, with the resolved settings.

    Raises ConfigError for a file that cannot be used and for settings that contradict it.
    """
    model = config.model
    found = load_checkpoint(path, name=model.model, need_weights=model.load_format != "dummy")
    checkpoint = choose_runner(found, model)
    adapted = adapt_to_pooling(config, checkpoint)
    return checkpoint, resolve(adapted, checkpoint.arch.max_position_embeddings)


def choose_runner(checkpoint: Checkpoint, model: ModelConfig) -> Checkpoint:
    """Settle whether the model generates or pools, and how it pools.

    Auto follows the checkpoint. Raises ConfigError for a runner that it cannot have.
    """
    is_encoder = checkpoint.arch.encoder is not None
    if model.runner == "generate":
        if is_encoder or (checkpoint.pooling is not None and checkpoint.pooling.task == "classify"):
            kind = "an encoder" if is_encoder else "a classifier"
            raise ConfigError(f"--runner generate is not possible: this model is {kind}; leave it out")
        _refuse_pooling_flags(model, "--runner generate is set")
        return replace(checkpoint, pooling=None)
    pooler = checkpoint.pooling
    if model.convert != "auto" and (pooler is None or pooler.task != model.convert):
        if is_encoder and model.convert == "classify":
            raise ConfigError("--convert classify is not possible: this encoder has no classifier; use --convert embed")
        pooler = _converted(checkpoint, model.convert)
    elif pooler is None and model.runner == "pooling":
        pooler = _converted(checkpoint, "embed")
    if pooler is None:
        _refuse_pooling_flags(model, "the model generates text; add --runner pooling")
        return checkpoint
    return replace(checkpoint, pooling=_with_overrides(pooler, model.pooler_config))


def _refuse_pooling_flags(model: ModelConfig, why: str) -> None:
    if model.convert != "auto":
        raise ConfigError(f"--convert {model.convert} is not possible: {why}")
    if model.pooler_config:
        raise ConfigError(f"--pooler-config is not possible: {why}")


def _converted(checkpoint: Checkpoint, task: str) -> PoolerConfig:
    """Give the pooling of a model that was not made for it."""
    config = None
    if checkpoint.format != "gguf":
        path = Path(checkpoint.root) / "config.json"
        config = Fields(path, read_json(path, required=True))
    if task == "embed":
        return embed_pooler(config, is_encoder=checkpoint.arch.encoder is not None)
    if config is None:
        raise ConfigError("--convert classify is not possible: a GGUF file has no classifier; use --convert embed")
    return class_pooler(config, checkpoint.arch.architecture)


def _with_overrides(pooler: PoolerConfig, wanted: Mapping[str, str | bool]) -> PoolerConfig:
    """Apply --pooler-config; normalize and use_activation are two names of one thing."""
    for key, value in wanted.items():
        if key not in _POOLER_KEYS:
            raise ConfigError(f"--pooler-config {key!r} is not known; it may hold {', '.join(_POOLER_KEYS)}")
        if key == "pooling_type":
            kind = _POOLING_TYPES.get(value.lower()) if isinstance(value, str) else None
            if kind is None:
                raise ConfigError(f"--pooler-config pooling_type {value!r} is not one of {', '.join(_POOLING_TYPES)}")
            pooler = replace(pooler, pooling_type=kind)
        elif not isinstance(value, bool):
            raise ConfigError(f"--pooler-config {key} {value!r} is not true or false")
        elif key == "is_matryoshka":
            pooler = replace(pooler, is_matryoshka=value)
        else:
            pooler = replace(pooler, uses_activation=value)
    return pooler


def adapt_to_pooling(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """Change the settings that mean something else for a pooling model.

    Its steps are not scheduled ahead: there is no next token to wait for. An encoder computes each prompt in one step
    and keeps no cache, and a model made for a shorter length than its position table is served at that length.
    """
    pooler = checkpoint.pooling
    if pooler is None:
        return config
    model, cache, scheduler = config.model, config.cache, replace(config.scheduler, async_scheduling=False)
    if pooler.max_seq_length is not None and model.max_model_len is None:
        length = min(pooler.max_seq_length, checkpoint.arch.max_position_embeddings)
        model = replace(model, max_model_len=length)
    if checkpoint.arch.encoder is not None:
        budget, chunk = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold
        longest = checkpoint.arch.max_position_embeddings
        length = longest if model.max_model_len in (None, -1) else model.max_model_len or longest
        if budget is not None and budget < length:
            raise ConfigError(
                f"--max-num-batched-tokens {budget} is below max_model_len={length}, and an encoder computes a prompt "
                "in one step; raise it or lower --max-model-len"
            )
        if chunk is not None and 0 < chunk < length:
            raise ConfigError(
                f"--long-prefill-token-threshold {chunk} is not possible: an encoder computes a prompt in one step; "
                "leave it out"
            )
        scheduler = replace(scheduler, enable_chunked_prefill=False)
        cache = replace(cache, enable_prefix_caching=False)
    return replace(config, model=model, cache=cache, scheduler=scheduler)
