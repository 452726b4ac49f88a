"""What a step may take on."""

from __future__ import annotations

import pytest

from serve.core.step_budget import StepBudget


def test_a_request_gets_at_most_what_is_left() -> None:
    budget = StepBudget(10)
    assert budget.cap(7) == 7
    budget.take(7)
    assert budget.cap(7) == 3


def test_the_threshold_caps_one_request_not_the_step() -> None:
    budget = StepBudget(10, long_prefill_token_threshold=4)
    assert budget.cap(9) == 4
    budget.take(4)
    assert budget.cap(9) == 4


def test_tokens_given_back_can_be_spent_again() -> None:
    budget = StepBudget(5)
    budget.take(5)
    budget.give_back(2)
    assert budget.cap(5) == 2


def test_overspending_is_our_own_mistake() -> None:
    budget = StepBudget(3)
    with pytest.raises(AssertionError, match="do not fit"):
        budget.take(4)
