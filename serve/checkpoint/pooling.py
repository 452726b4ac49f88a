"""Finds out whether a checkpoint is a pooling model, and how it pools, from config.json and modules.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from serve.checkpoint.arch import ClassActivation, ClassHead, PoolerConfig, PoolingType
from serve.checkpoint.encoder import ENCODERS
from serve.checkpoint.fields import Fields, fail, read_json, read_json_list

# Architectures that are a decoder of another name with no head, or with a classifier in its place.
DECODER_ALIASES: Final = {
    "LlamaModel": "LlamaForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "MistralForSequenceClassification": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
}
_LENGTH_FILES: Final = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_MODES: Final[dict[str, PoolingType]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES: Final[dict[str, PoolingType]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_PROBLEM_ACTIVATIONS: Final[dict[str, ClassActivation]] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_TORCH_ACTIVATIONS: Final[dict[str, ClassActivation]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "identity",
}
_FOLDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class _Modules:
    """What modules.json lists: how rows are pooled, and whether the result is brought to length 1."""

    pooling_type: PoolingType
    has_normalize: bool


def pooler_config(folder: Path, config: Fields, architecture: str) -> PoolerConfig | None:
    """Say how the model of a folder pools, None for a model that generates. Raises ConfigError."""
    is_encoder = architecture in ENCODERS
    if architecture.endswith("ForSequenceClassification"):
        return class_pooler(config, architecture)
    modules = _read_modules(folder)
    if not is_encoder and architecture not in DECODER_ALIASES and modules is None:
        return None
    pooler = embed_pooler(config, is_encoder=is_encoder)
    if modules is None:
        return pooler
    return replace(
        pooler,
        pooling_type=modules.pooling_type,
        uses_activation=modules.has_normalize,
        max_seq_length=_max_seq_length(folder),
    )


def embed_pooler(config: Fields | None, *, is_encoder: bool) -> PoolerConfig:
    """Give the pooling of an embedding model that nothing more is known of: the first row of an encoder, else the last.

    config is None for a file without one.
    """
    pooling_type: PoolingType = "cls" if is_encoder else "last"
    if config is None:
        return PoolerConfig(pooling_type=pooling_type)
    dimensions = config.ids("matryoshka_dimensions")
    if 0 in dimensions:
        fail(config.path, "matryoshka_dimensions holds 0")
    return PoolerConfig(
        pooling_type=pooling_type,
        is_matryoshka=config.boolean("is_matryoshka", False) or bool(dimensions),
        dimensions=dimensions,
    )


def class_pooler(config: Fields, architecture: str) -> PoolerConfig:
    """Give the pooling of a classifier: its labels, its head and what turns scores into probabilities."""
    labels = _labels(config)
    head: ClassHead = "linear"
    if architecture in ENCODERS:
        head = "roberta" if ENCODERS[architecture].counts_from_pad else "bert"
    return PoolerConfig(
        task="classify",
        pooling_type="last" if head == "linear" else "cls",
        head=head,
        activation=_class_activation(config, len(labels)),
        labels=labels,
    )


def _labels(config: Fields) -> tuple[str, ...]:
    named = config.child("id2label")
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", 2, maximum=1 << 16)))
    count = config.integer("num_labels", named.size, maximum=1 << 16)
    return tuple(named.text(str(i), f"LABEL_{i}") or "" for i in range(count))


def _class_activation(config: Fields, num_labels: int) -> ClassActivation:
    problem = config.text("problem_type")
    if problem in _PROBLEM_ACTIVATIONS:
        return _PROBLEM_ACTIVATIONS[problem]
    trained = config.child("sentence_transformers")
    named = trained.text("activation_fn") if trained is not None else None
    named = named or config.text("sbert_ce_default_activation_function")
    if named is not None:
        if named not in _TORCH_ACTIVATIONS:
            fail(config.path, f"activation {named!r} is not supported; supported: {', '.join(_TORCH_ACTIVATIONS)}")
        return _TORCH_ACTIVATIONS[named]
    return "sigmoid" if num_labels == 1 else "softmax"


def _read_modules(folder: Path) -> _Modules | None:
    """Read modules.json of sentence-transformers; None when there is none or it has no pooling module."""
    path = folder / "modules.json"
    pooling_type: PoolingType | None = None
    has_normalize = False
    for entry in read_json_list(path):
        fields = Fields(path, entry)
        kind = (fields.text("type") or "").rpartition(".")[2]
        if kind == "Pooling":
            pooling_type = _pooling_type(folder / _module_folder(path, fields))
        elif kind == "Normalize":
            has_normalize = True
        elif kind != "Transformer":
            fail(path, f"module {kind!r} is not supported; supported: Transformer, Pooling, Normalize")
    return None if pooling_type is None else _Modules(pooling_type, has_normalize)


def _module_folder(path: Path, fields: Fields) -> str:
    # A name is a folder beside the file, never a path.
    name = fields.text("path") or ""
    if not _FOLDER_NAME.fullmatch(name):
        fail(path, f"names the folder {name!r}, which is not the name of a folder beside it")
    return name


def _pooling_type(folder: Path) -> PoolingType:
    path = folder / "config.json"
    fields = Fields(path, read_json(path, required=True))
    named = fields.text("pooling_mode")
    if named is not None:
        found = [_MODE_NAMES[named]] if named in _MODE_NAMES else []
    else:
        found = [kind for key, kind in _MODES.items() if fields.boolean(key, False)]
    if len(found) != 1:
        fail(path, f"must name one kind of pooling; supported: {', '.join(_MODE_NAMES)}")
    return found[0]


def _max_seq_length(folder: Path) -> int | None:
    for name in _LENGTH_FILES:
        fields = Fields(folder / name, read_json(folder / name, required=False))
        if fields.has("max_seq_length"):
            return fields.integer("max_seq_length")
    return None
