"""The restriction of one request: end tokens it forbids, failures, and answers that are complete at once."""

from __future__ import annotations

import numpy as np

from serve.core.structured_output.constraint import Constraint
from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.sampling_params import SamplingParams
from tests.unit.core.structured_output.fakes import TextGrammar, allowed_ids

TOKENS = [b"a", b"b", b"c", b"<eos>"]
EOS = 3


def make(params: SamplingParams, *texts: bytes, can_end: bool = True, fail_after: int = 99) -> Constraint:
    grammar = TextGrammar(TOKENS, texts, [EOS], fail_after)
    return Constraint(params, ReasoningGate(None, grammar, TOKENS), (EOS,), can_end=can_end)


def fill(constraint: Constraint, num_output_tokens: int = 0) -> list[int] | None:
    row = np.zeros(1, np.uint32)
    return allowed_ids(row) if constraint.fill(row, num_output_tokens) else None


def test_end_tokens_are_allowed_where_the_text_may_end() -> None:
    constraint = make(SamplingParams(), b"a", b"ab")
    assert constraint.accept(0)
    assert fill(constraint, 1) == [1, EOS]


def test_min_tokens_holds_end_tokens_back_while_something_else_can_follow() -> None:
    constraint = make(SamplingParams(min_tokens=2, max_tokens=5), b"a", b"abc")
    assert constraint.accept(0)
    assert fill(constraint, 1) == [1]
    assert not constraint.ends_now


def test_a_text_that_can_only_end_ends_although_end_tokens_are_forbidden() -> None:
    for params in (SamplingParams(min_tokens=5, max_tokens=5), SamplingParams(ignore_eos=True)):
        constraint = make(params, b"a")
        assert constraint.accept(0)
        assert fill(constraint, 1) is None
        assert constraint.ends_now
        assert constraint.failure is None


def test_a_model_without_end_tokens_never_sees_one() -> None:
    constraint = make(SamplingParams(), b"a", b"ab", can_end=False)
    assert constraint.accept(0)
    assert fill(constraint, 1) == [1]


def test_a_grammar_that_fails_leaves_the_row_open_and_says_why() -> None:
    constraint = make(SamplingParams(), b"ab", fail_after=1)
    assert fill(constraint) == [0]
    assert constraint.accept(0)
    assert fill(constraint, 1) is None
    assert constraint.failure == "invalid_request: too complex"


def test_a_token_that_does_not_fit_is_a_failure() -> None:
    constraint = make(SamplingParams(), b"ab")
    assert not constraint.accept(1)
    assert (constraint.failure or "").startswith("grammar_error: ")
    assert not constraint.is_finished


def test_a_complete_text_is_finished() -> None:
    constraint = make(SamplingParams(), b"ab")
    assert [constraint.accept(token) for token in (0, 1)] == [True, True]
    assert constraint.is_finished
