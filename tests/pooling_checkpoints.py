"""Writes tiny seeded checkpoints of pooling models: encoders and decoders, with and without a classifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel

from tests.checkpoints import VOCAB_SIZE, tiny_config, write_tokenizer

ENCODER_POSITIONS: Final = 96
_ENCODER_CONFIGS: Final = {
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
    "xlm-roberta": transformers.XLMRobertaConfig,
}
WORDS: Final = (
    *("the", "a", "cat", "dog", "car", "house", "runs", "eats", "big", "small", "red", "blue", "how", "many", "people"),
    *("live", "in", "berlin", "paris", "is", "city", "of", "and", "million", "river", "bridge", "old", "new"),
)
WORD_TOKENS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"bcdefghijklmnopqrstuvwxyz", "##s", "?")


def build_pooling_reference(architecture: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Make the transformers model of a tiny config, by the name of its class, with seeded weights."""
    family = {"Ber": "bert", "Rob": "roberta", "XLM": "xlm-roberta"}.get(architecture[:3])
    if family is not None:
        config = _encoder_config(family, **changes)
    else:
        config = tiny_config(architecture.removesuffix("Model").partition("For")[0].lower(), **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name.lower():
                parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def _encoder_config(family: str, **changes: object) -> transformers.PreTrainedConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": ENCODER_POSITIONS + (0 if family == "bert" else 2),
        "type_vocab_size": 2 if family == "bert" else 1,
        "pad_token_id": 0 if family == "bert" else 1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _ENCODER_CONFIGS[family](**(settings | changes))


def write_pooling_checkpoint(
    folder: Path, architecture: str, *, modules: Mapping[str, bool] | None = None, seed: int = 0, **changes: object
) -> Path:
    """Write a seeded pooling model with a tokenizer. Returns folder.

    modules, the flags of 1_Pooling/config.json, makes it a folder of sentence-transformers with normalisation.
    """
    build_pooling_reference(architecture, seed=seed, **changes).save_pretrained(folder)
    if architecture.startswith(("Bert", "Roberta", "XLM")):
        write_word_tokenizer(folder)
    else:
        write_tokenizer(folder)
    if modules is not None:
        write_modules(folder, modules)
    return folder


def write_modules(folder: Path, flags: Mapping[str, bool], *, normalizes: bool = True) -> None:
    """Write what sentence-transformers writes beside a model."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))


def write_word_tokenizer(folder: Path) -> None:
    """Write a word-piece tokenizer with BERT's template for one text and for two, cut and padded when saved."""
    vocab = {token: index for index, token in enumerate(WORD_TOKENS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
