"""Bounds of one request's sampling parameters: what is too much is refused with the limit and its flag."""

from __future__ import annotations

import msgspec
import pytest

from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.sampling_params import RepetitionDetection, SamplingParams, normalize


@pytest.mark.parametrize(
    ("limits", "params", "flag", "param"),
    [
        ({"max_n": 2}, {"n": 3}, "--max-n", "n"),
        ({"max_stop": 1}, {"stop": ("a", "b")}, "--max-stop", "stop"),
        ({"max_stop_chars": 3}, {"stop": ("ab", "cd")}, "--max-stop-chars", "stop"),
        ({"max_stop_token_ids": 1}, {"stop_token_ids": (1, 2)}, "--max-stop-token-ids", "stop_token_ids"),
        ({"max_bad_words": 1}, {"bad_words": ("a", "b")}, "--max-bad-words", "bad_words"),
        ({"max_bad_words_chars": 3}, {"bad_words": ("ab", "cd")}, "--max-bad-words-chars", "bad_words"),
        ({"max_logit_bias": 1}, {"logit_bias": {1: 0.0, 2: 0.0}}, "--max-logit-bias", "logit_bias"),
        (
            {"max_logprob_token_ids": 1},
            {"logprobs": 0, "logprob_token_ids": (1, 2)},
            "--max-logprob-token-ids",
            "logprob_token_ids",
        ),
    ],
)
def test_one_more_than_the_limit_is_refused_and_the_limit_itself_is_not(
    limits: dict[str, int], params: dict[str, object], flag: str, param: str
) -> None:
    asked = msgspec.structs.replace(SamplingParams(), **params)
    with pytest.raises(InvalidRequest) as refusal:
        normalize(asked, RequestLimits(**limits))
    (limit,) = limits.values()
    assert refusal.value.param == param
    assert f"the limit is {limit};" in str(refusal.value)
    assert str(refusal.value).endswith(f"a larger {flag}")
    raised = RequestLimits(**{name: value + 1 for name, value in limits.items()})
    assert normalize(asked, raised if "chars" not in flag else RequestLimits()) == asked


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"logprob_token_ids": (1,)}, "needs logprobs"),
        ({"logprob_token_ids": (1, 1), "logprobs": 0}, "free of repeated ids"),
        ({"logprob_token_ids": (), "logprobs": 0}, "a non-empty list"),
        ({"logprob_token_ids": (1, 2), "logprobs": 5}, "holds 2 ids and 5 best tokens"),
    ],
)
def test_ids_whose_logprobs_are_wanted_fit_the_other_fields(params: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        normalize(msgspec.structs.replace(SamplingParams(), **params))


@pytest.mark.parametrize("logprobs", [0, 2])
def test_ids_may_come_with_no_best_tokens_or_as_many(logprobs: int) -> None:
    params = SamplingParams(logprobs=logprobs, logprob_token_ids=(4, 7))
    assert normalize(params) == params


@pytest.mark.parametrize(
    ("loop", "param"),
    [
        ((1, 4, 1), "min_count"),
        ((0, 4, 2), "min_pattern_size"),
        ((5, 4, 2), "max_pattern_size"),
        ((1, 100_000, 2), "max_pattern_size"),
        ((1, 1000, 1000), "min_count"),
    ],
)
def test_loops_that_cannot_be_looked_for_are_refused(loop: tuple[int, int, int], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        normalize(SamplingParams(repetition_detection=RepetitionDetection(*loop)))
    assert refusal.value.param == f"repetition_detection.{param}"
