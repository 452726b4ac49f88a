"""serve/checkpoint: encoders, sentence-transformers folders, and what --runner, --convert, --pooler-config change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from serve.checkpoint import Checkpoint, PoolerConfig, load_checkpoint
from serve.checkpoint.runner import choose_runner, describe_model
from serve.config import EngineConfig, ModelConfig, SchedulerConfig
from serve.errors import ConfigError, ExitCode
from tests.pooling_checkpoints import write_modules

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
ROBERTA = BERT | {"architectures": ["RobertaModel"], "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def pooler(folder: Path, config: dict[str, object]) -> PoolerConfig:
    found = load_checkpoint(write(folder, config)).pooling
    assert found is not None
    return found


def refusal(folder: Path, config: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(write(folder, config))
    assert caught.value.exit_code == ExitCode.MODEL
    return str(caught.value)


def chosen(folder: Path, config: dict[str, object], **settings: object) -> Checkpoint:
    return choose_runner(load_checkpoint(write(folder, config)), ModelConfig(**settings))


def test_bert_config_becomes_an_encoder(tmp_path: Path) -> None:
    arch = load_checkpoint(write(tmp_path, BERT)).arch
    assert arch.encoder is not None
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size, arch.max_position_embeddings) == (4, 4, 12, 64)
    assert (arch.encoder.layer_norm_eps, arch.encoder.num_token_types, arch.encoder.position_offset) == (1e-12, 2, 0)
    assert arch.hidden_act == "gelu"


def test_positions_of_roberta_begin_after_the_pad_token(tmp_path: Path) -> None:
    arch = load_checkpoint(write(tmp_path, ROBERTA)).arch
    assert arch.encoder is not None
    assert (arch.encoder.position_offset, arch.max_position_embeddings) == (2, 62)


def test_model_type_names_the_encoder_when_no_architecture_does(tmp_path: Path) -> None:
    config = {key: value for key, value in ROBERTA.items() if key != "architectures"}
    assert load_checkpoint(write(tmp_path, config)).arch.architecture == "RobertaModel"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; supported: gelu"),
        ({"is_decoder": True}, "is_decoder is set"),
        ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of num_attention_heads 5"),
        ({"quantization_config": {}}, "a quantisation without quant_method is not supported"),
        ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions holds 0"),
    ],
)
def test_encoder_that_cannot_be_served_is_refused(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    assert problem in refusal(tmp_path, BERT | change)


def test_plain_encoder_pools_its_first_row_to_length_one(tmp_path: Path) -> None:
    assert pooler(tmp_path, BERT) == PoolerConfig(task="embed", pooling_type="cls", uses_activation=True)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_sentence_transformers_files_decide_how_to_pool(tmp_path: Path, flags: dict[str, object], kind: str) -> None:
    write(tmp_path, BERT)
    write_modules(tmp_path, flags)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    found = load_checkpoint(tmp_path).pooling
    assert found is not None
    assert (found.pooling_type, found.uses_activation, found.max_seq_length) == (kind, True, 32)
    write_modules(tmp_path, flags, normalizes=False)
    found = load_checkpoint(tmp_path).pooling
    assert found is not None
    assert not found.uses_activation


@pytest.mark.parametrize(
    "flags", [{}, {"pooling_mode_max_tokens": True}, {"pooling_mode": "max"}, {**MEAN, "pooling_mode_cls_token": True}]
)
def test_other_ways_to_pool_are_refused(tmp_path: Path, flags: dict[str, object]) -> None:
    write(tmp_path, BERT)
    write_modules(tmp_path, flags)
    with pytest.raises(ConfigError, match="must name one kind of pooling; supported: cls, mean, lasttoken"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "module 'Dense' is not supported"),
        ([{"type": "x.Pooling", "path": "../up"}], "names the folder '../up'"),
        ([{"type": "x.Pooling", "path": "absent"}], "does not exist"),
        ({"type": "x"}, "does not hold a JSON list of objects"),
        ([1], "does not hold a JSON list of objects"),
    ],
)
def test_modules_that_cannot_be_used_are_refused(tmp_path: Path, modules: object, problem: str) -> None:
    write(tmp_path, BERT)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=problem):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "activation", "labels"),
    [
        ({}, "softmax", ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, "softmax", ("no", "maybe", "yes")),
        ({"num_labels": 1}, "sigmoid", ("LABEL_0",)),
        ({"id2label": {"0": "fit"}, "problem_type": "regression"}, "identity", ("fit",)),
        ({"problem_type": "multi_label_classification"}, "sigmoid", ("LABEL_0", "LABEL_1")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
            ("LABEL_0",),
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
            ("LABEL_0",),
        ),
    ],
)
def test_classifiers_have_labels_and_an_activation(
    tmp_path: Path, change: dict[str, object], activation: str, labels: tuple[str, ...]
) -> None:
    found = pooler(tmp_path, BERT | {"architectures": ["BertForSequenceClassification"]} | change)
    assert (found.task, found.head, found.activation, found.labels) == ("classify", "bert", activation, labels)
    assert found.tasks == ("classify",)
    assert found.scores_pairs == (len(labels) == 1)


def test_activation_of_unknown_code_is_refused(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"]}
    message = refusal(tmp_path, config | {"sbert_ce_default_activation_function": "os.system"})
    assert "activation 'os.system' is not supported" in message


def test_decoder_without_a_head_is_an_embedding_model(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write(tmp_path, LLAMA | {"architectures": ["LlamaModel"]}))
    assert checkpoint.arch.architecture == "LlamaForCausalLM"
    assert checkpoint.pooling == PoolerConfig(task="embed", pooling_type="last")


def test_decoder_with_a_classifier_takes_its_last_row_through_one_matrix(tmp_path: Path) -> None:
    found = pooler(tmp_path, LLAMA | {"architectures": ["LlamaForSequenceClassification"]})
    assert (found.task, found.pooling_type, found.head) == ("classify", "last", "linear")
    assert found.tasks == ("classify", "token_classify")


def test_generating_model_in_a_folder_of_sentence_transformers_pools(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    checkpoint = load_checkpoint(tmp_path)
    assert choose_runner(checkpoint, ModelConfig()).pooling is not None
    assert choose_runner(checkpoint, ModelConfig(runner="generate")).pooling is None


def test_generating_model_pools_when_asked_to(tmp_path: Path) -> None:
    assert chosen(tmp_path, LLAMA).pooling is None
    assert chosen(tmp_path, LLAMA, runner="pooling").pooling == PoolerConfig(task="embed", pooling_type="last")
    assert chosen(tmp_path, LLAMA, convert="embed").pooling == PoolerConfig(task="embed", pooling_type="last")
    classes = chosen(tmp_path, LLAMA | {"num_labels": 3}, convert="classify").pooling
    assert classes is not None
    assert (classes.task, len(classes.labels), classes.head) == ("classify", 3, "linear")


def test_pooler_config_changes_what_the_checkpoint_says(tmp_path: Path) -> None:
    wanted = {"pooling_type": "MEAN", "normalize": False, "is_matryoshka": True}
    found = chosen(tmp_path, BERT, pooler_config=wanted).pooling
    assert found == PoolerConfig(task="embed", pooling_type="mean", uses_activation=False, is_matryoshka=True)


@pytest.mark.parametrize(
    ("config", "settings", "problem"),
    [
        (BERT, {"runner": "generate"}, "this model is an encoder"),
        (BERT, {"convert": "classify"}, "this encoder has no classifier"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            {"runner": "generate"},
            "this model is a classifier",
        ),
        (LLAMA, {"runner": "generate", "convert": "embed"}, "--convert embed is not possible: --runner generate"),
        (LLAMA, {"pooler_config": {"normalize": True}}, "--pooler-config is not possible: the model generates text"),
        (BERT, {"pooler_config": {"pooling_type": "max"}}, "pooling_type 'max' is not one of cls, last, mean"),
        (BERT, {"pooler_config": {"pooling_type": True}}, "pooling_type True is not one of"),
        (BERT, {"pooler_config": {"normalize": "yes"}}, "normalize 'yes' is not true or false"),
        (BERT, {"pooler_config": {"step_tag_id": True}}, "'step_tag_id' is not known; it may hold pooling_type"),
    ],
)
def test_runner_that_the_model_cannot_have_is_refused(
    tmp_path: Path, config: dict[str, object], settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        chosen(tmp_path, config, **settings)


def settings_of(folder: Path, **scheduler: object) -> EngineConfig:
    asked = EngineConfig(model=ModelConfig(model=str(folder)), scheduler=SchedulerConfig(**scheduler))
    return describe_model(folder, asked)[1]


def test_encoder_is_scheduled_in_whole_prompts_without_a_cache(tmp_path: Path) -> None:
    config = settings_of(write(tmp_path, BERT | {"max_position_embeddings": 1024}))
    assert not config.scheduler.async_scheduling
    assert not config.scheduler.enable_chunked_prefill
    assert not config.cache.enable_prefix_caching
    assert (config.scheduler.max_num_batched_tokens, config.model.max_model_len) == (1024, 1024)


def test_pooling_decoder_keeps_chunks_and_cache_but_is_not_scheduled_ahead(tmp_path: Path) -> None:
    config = settings_of(write(tmp_path, LLAMA | {"architectures": ["LlamaModel"]}))
    assert not config.scheduler.async_scheduling
    assert config.scheduler.enable_chunked_prefill
    assert config.cache.enable_prefix_caching


def test_model_is_served_at_the_length_it_was_made_for_unless_another_is_asked(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    write_modules(tmp_path, MEAN)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert settings_of(tmp_path).model.max_model_len == 32
    asked = EngineConfig(model=ModelConfig(model="m", max_model_len=64))
    assert describe_model(tmp_path, asked)[1].model.max_model_len == 64
    with pytest.raises(ConfigError, match="--max-model-len 65 exceeds the model's context of 64 tokens"):
        describe_model(tmp_path, replace(asked, model=replace(asked.model, max_model_len=65)))


@pytest.mark.parametrize(
    ("scheduler", "problem"),
    [
        ({"max_num_batched_tokens": 63}, "--max-num-batched-tokens 63 is below max_model_len=64"),
        ({"long_prefill_token_threshold": 10}, "--long-prefill-token-threshold 10 is not possible"),
    ],
)
def test_steps_that_cut_an_encoders_prompts_are_refused(
    tmp_path: Path, scheduler: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_of(write(tmp_path, BERT), **scheduler)
