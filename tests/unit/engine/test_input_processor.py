"""The last gate: what the engine gets is complete, and what it cannot run is refused with field and limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.config import ModelConfig
from serve.engine.input_processor import InputProcessor, RequestOptions, default_sampling, internal_id
from serve.errors import ConfigError, InvalidRequest
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreRequest
from tests.fakes import BYTE_VOCAB_SIZE, EOS_ID, SECOND_EOS_ID, ByteTokenizer, byte_checkpoint

MAX_LEN = 128


def processor(config: ModelConfig | None = None, tokenizer: ByteTokenizer | None = None) -> InputProcessor:
    tokenizer = tokenizer or ByteTokenizer()
    checkpoint = byte_checkpoint(tokenizer.vocab_size)
    return InputProcessor(tokenizer, checkpoint=checkpoint, config=config or ModelConfig(), max_model_len=MAX_LEN)


def process(
    prompt: list[int], subject: InputProcessor | None = None, options: RequestOptions | None = None, **changes: object
) -> EngineCoreRequest:
    params = SamplingParams(**changes)  # type: ignore[arg-type]
    options = options or RequestOptions()
    return (subject or processor()).process(prompt, params, request_id="req", options=options)


def refusal(prompt: list[int], subject: InputProcessor | None = None, **changes: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        process(prompt, subject, **changes)
    return caught.value


def test_an_empty_prompt_is_refused() -> None:
    assert refusal([]).param == "prompt"


@pytest.mark.parametrize(
    ("allowed", "changes"),
    [
        ((EOS_ID,), {"min_tokens": 1}),
        ((EOS_ID, SECOND_EOS_ID, 7), {"min_tokens": 1, "stop_token_ids": (7,), "ignore_eos": True}),
        ((97,), {"bad_words": ("a",)}),
        ((97, EOS_ID), {"bad_words": ("a",), "min_tokens": 2}),
    ],
)
def test_allowed_tokens_that_are_all_forbidden_are_refused(allowed: tuple[int, ...], changes: dict) -> None:
    assert refusal([1], allowed_token_ids=allowed, max_tokens=5, **changes).param == "allowed_token_ids"
    assert process([1], allowed_token_ids=(*allowed, 98), max_tokens=5, **changes).sampling_params.max_tokens == 5
    assert process([1], allowed_token_ids=allowed, max_tokens=5).sampling_params.allowed_token_ids == allowed


@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 1000])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(length: int) -> None:
    error = refusal([1] * length)
    assert error.code == "context_length_exceeded"
    assert str(length) in str(error)
    assert str(MAX_LEN - 1) in str(error)


def test_the_longest_prompt_gets_one_token() -> None:
    assert process([1] * (MAX_LEN - 1), max_tokens=50).sampling_params.max_tokens == 1


@pytest.mark.parametrize(("wanted", "given"), [(10, 10), (126, 126), (127, 126), (10_000, 126)])
def test_max_tokens_is_cut_to_the_room_after_the_prompt(wanted: int, given: int) -> None:
    assert process([1, 2], max_tokens=wanted).sampling_params.max_tokens == given


@pytest.mark.parametrize("token_id", [-1, BYTE_VOCAB_SIZE, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused_everywhere(token_id: int) -> None:
    assert refusal([1, token_id, 2]).param == "prompt"
    assert refusal([1], stop_token_ids=(3, token_id)).param == "stop_token_ids"
    assert refusal([1], allowed_token_ids=(token_id,)).param == "allowed_token_ids"
    assert refusal([1], logit_bias={token_id: 1.0}).param == "logit_bias"


def test_the_largest_token_id_is_accepted() -> None:
    last = BYTE_VOCAB_SIZE - 1
    params = process([last], stop_token_ids=(last,), logit_bias={last: 5.0}).sampling_params
    assert params.logit_bias == {last: 5.0}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited_by_the_server(name: str) -> None:
    assert getattr(process([1], **{name: 20}).sampling_params, name) == 20
    for count in (21, -1):
        error = refusal([1], **{name: count})
        assert error.param == name
        assert "--max-logprobs" in str(error)
    unlimited = processor(ModelConfig(max_logprobs=-1))
    assert getattr(process([1], unlimited, **{name: -1}).sampling_params, name) == -1
    assert refusal([1], unlimited, **{name: BYTE_VOCAB_SIZE + 1}).param == name


def test_model_free_checks_run_too() -> None:
    assert refusal([1], temperature=3.0).param == "temperature"
    assert process([1], temperature=0.001).sampling_params.temperature == 0.01


def test_end_ids_of_the_model_are_merged_behind_the_requests_own() -> None:
    params = process([1], stop_token_ids=(7, SECOND_EOS_ID, 7)).sampling_params
    assert params.eos_token_id == EOS_ID
    assert params.stop_token_ids == (7, SECOND_EOS_ID)
    assert params.all_stop_token_ids == (7, EOS_ID, SECOND_EOS_ID)


def test_ignore_eos_leaves_only_the_requests_own_stop_ids() -> None:
    params = process([1], stop_token_ids=(7,), ignore_eos=True).sampling_params
    assert params.eos_token_id is None
    assert params.stop_token_ids == (7,)
    assert params.all_stop_token_ids == (7, EOS_ID, SECOND_EOS_ID)


def test_the_models_first_end_id_serves_when_the_tokenizer_has_none() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    params = process([1], processor(tokenizer=tokenizer)).sampling_params
    assert params.eos_token_id == EOS_ID
    assert params.stop_token_ids == (SECOND_EOS_ID,)


def test_bad_words_are_tokenized_with_and_without_a_leading_space() -> None:
    class SpaceTokenizer(ByteTokenizer):
        """Knows " foo" and "foo" as one token each, so the spaced form begins with another token."""

        def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
            known = {"foo": [1], " foo": [2], "foo bar": [1, 4], " foo bar": [2, 4]}
            return known.get(text) or super().encode(text, add_special_tokens=add_special_tokens)

    subject = processor(tokenizer=SpaceTokenizer())
    params = process([1], subject, bad_words=("foo", " foo bar", "xy")).sampling_params
    assert params.bad_words_token_ids == ((1,), (2,), (1, 4), (2, 4), (120, 121))


def test_bad_words_without_tokens_or_too_long_are_refused() -> None:
    assert refusal([1], bad_words=(" ",)).param == "bad_words"
    assert refusal([1], bad_words=("x" * 20_000,)).param == "bad_words"


@pytest.mark.parametrize("salt", ["", "x" * 129, "a\nb", "a\x00"])
def test_a_cache_salt_must_be_short_and_visible(salt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        process([1], options=RequestOptions(cache_salt=salt))
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize("priority", [2**63, -(2**64)])
def test_a_priority_must_fit_in_64_bits(priority: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        process([1], options=RequestOptions(priority=priority))
    assert caught.value.param == "priority"


def test_internal_ids_keep_the_clients_id_in_front_and_never_repeat() -> None:
    ids = {internal_id("cmpl-1") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(i.startswith("cmpl-1-") for i in ids)


def test_default_sampling_comes_from_the_model_then_the_override(tmp_path: Path) -> None:
    checkpoint = byte_checkpoint()
    checkpoint.generation_defaults.update(temperature=0.6, top_p=0.9)
    assert default_sampling(checkpoint, ModelConfig()) == {"temperature": 0.6, "top_p": 0.9}
    assert default_sampling(checkpoint, ModelConfig(generation_config="vllm")) == {}
    override = ModelConfig(override_generation_config={"temperature": 0.2})
    assert default_sampling(checkpoint, override) == {"temperature": 0.2, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 5, "eos_token_id": 3, "do_sample": True}))
    assert default_sampling(checkpoint, ModelConfig(generation_config=str(tmp_path))) == {"top_k": 5}


@pytest.mark.parametrize("content", [None, "not json", "[1]"])
def test_an_unusable_generation_config_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        default_sampling(byte_checkpoint(), ModelConfig(generation_config=str(tmp_path)))


def test_a_server_wide_max_new_tokens_limits_every_request() -> None:
    subject = processor(ModelConfig(override_generation_config={"max_new_tokens": 5}))
    assert process([1], subject, max_tokens=50).sampling_params.max_tokens == 5
    assert process([1], subject, max_tokens=3).sampling_params.max_tokens == 3


def test_the_models_own_max_new_tokens_is_a_default_not_a_limit() -> None:
    checkpoint = byte_checkpoint()
    checkpoint.generation_defaults["max_new_tokens"] = 5
    subject = InputProcessor(ByteTokenizer(), checkpoint=checkpoint, config=ModelConfig(), max_model_len=MAX_LEN)
    assert process([1], subject, max_tokens=50).sampling_params.max_tokens == 50
