"""Thinking before a grammar: when masks bind, how the end mark is found, and how a budget forces it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.sampling_params import ReasoningBounds
from tests.unit.core.structured_output.fakes import TextGrammar, allowed_ids

CHARS = [bytes([byte]) for byte in range(128)]
OPEN, CLOSE, EOS, MIXED, BLANK = 128, 129, 130, 131, 132
TOKENS = [*CHARS, b"<t>", b"</t>", b"<eos>", b"</t>a", b"</t>\n"]
NUM_WORDS = -(-len(TOKENS) // 32)


def make_gate(
    *, start: int | None = None, budget: int | None = None, texts: tuple[bytes, ...] | None = (b"ab",)
) -> ReasoningGate:
    grammar = None if texts is None else TextGrammar(TOKENS, texts, [EOS])
    return ReasoningGate(ReasoningBounds("</t>", (ord("!"), CLOSE), start, budget), grammar, TOKENS)


def mask(gate: ReasoningGate) -> list[int] | None:
    row = np.full(NUM_WORDS, 0xFFFFFFFF, np.uint32)
    return allowed_ids(row) if gate.fill(row) else None


def feed(gate: ReasoningGate, text: bytes) -> bool:
    return all(gate.accept(byte) for byte in text)


def test_without_bounds_the_grammar_binds_from_the_start() -> None:
    gate = ReasoningGate(None, TextGrammar(TOKENS, [b"ab"], [EOS]), TOKENS)
    assert gate.may_restrict(0)
    assert gate.may_restrict(1)
    assert mask(gate) == [ord("a")]
    assert not gate.accept(ord("b"))


def test_without_bounds_and_grammar_nothing_is_restricted() -> None:
    gate = ReasoningGate(None, None, TOKENS)
    assert not gate.may_restrict(3)
    assert mask(gate) is None
    assert gate.accept(5)
    assert not gate.is_finished


def test_thinking_needs_no_mask_and_the_mark_is_not_fed_to_the_grammar() -> None:
    gate = make_gate()
    assert not gate.may_restrict(0)
    # A pending token may be the mark.
    assert gate.may_restrict(1)
    assert mask(gate) is None
    assert feed(gate, b"zz")
    assert gate.accept(CLOSE)
    assert mask(gate) == [ord("a")]
    assert feed(gate, b"ab")
    assert gate.is_finished


@pytest.mark.parametrize("cuts", list(itertools.combinations(range(1, 6), 3)))
def test_the_mark_is_found_wherever_tokens_cut_it(cuts: tuple[int, ...]) -> None:
    text = b"x<</t>"
    places = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    tokens = [*TOKENS, *pieces]
    gate = ReasoningGate(ReasoningBounds("</t>", (CLOSE,)), TextGrammar(tokens, [b"ab"], [EOS]), tokens)
    for index in range(len(pieces)):
        assert not gate.may_restrict(0), "the mark was found too early"
        assert gate.accept(len(TOKENS) + index)
    assert gate.may_restrict(0)


def test_text_behind_the_mark_in_its_token_belongs_to_the_grammar() -> None:
    gate = make_gate()
    assert gate.accept(MIXED)
    assert mask(gate) == [ord("b")]


def test_blanks_behind_the_mark_that_the_grammar_refuses_are_ignored() -> None:
    gate = make_gate()
    assert gate.accept(BLANK)
    assert mask(gate) == [ord("a")]


def test_other_text_behind_the_mark_that_the_grammar_refuses_is_an_error() -> None:
    assert not make_gate(texts=(b"q",)).accept(MIXED)


def test_an_undecided_answer_may_think_or_follow_the_grammar() -> None:
    thinking = make_gate(start=OPEN)
    assert mask(thinking) == [ord("a"), OPEN]
    assert thinking.accept(OPEN)
    assert mask(thinking) is None
    assert feed(thinking, b"hm</t>a")
    assert mask(thinking) == [ord("b")]
    direct = make_gate(start=OPEN)
    assert direct.accept(ord("a"))
    assert mask(direct) == [ord("b")]
    wrong = make_gate(start=OPEN)
    assert not wrong.accept(ord("z"))


def test_a_spent_budget_forces_the_mark_token_by_token() -> None:
    gate = make_gate(budget=2)
    assert feed(gate, b"xy")
    assert gate.may_restrict(0)
    assert mask(gate) == [ord("!")]
    assert gate.accept(ord("!"))
    assert mask(gate) == [CLOSE]
    assert gate.accept(CLOSE)
    assert mask(gate) == [ord("a")]


def test_a_budget_of_none_at_all_ends_the_thinking_at_once() -> None:
    assert mask(make_gate(budget=0)) == [ord("!")]
    gate = make_gate(budget=0, start=OPEN)
    assert mask(gate) == [ord("a"), OPEN]
    assert gate.accept(OPEN)
    assert mask(gate) == [ord("!")]


def test_forced_ids_that_do_not_spell_the_mark_end_the_thinking_all_the_same() -> None:
    gate = ReasoningGate(ReasoningBounds("</t>", (ord("."),), None, 1), TextGrammar(TOKENS, [b"q"], [EOS]), TOKENS)
    assert feed(gate, b"x.")
    assert mask(gate) == [ord("q")]


def test_a_budget_works_without_a_grammar() -> None:
    gate = make_gate(budget=2, texts=None)
    assert not gate.may_restrict(1)
    # Two pending tokens could spend it.
    assert gate.may_restrict(2)
    assert feed(gate, b"xy")
    assert mask(gate) == [ord("!")]
    assert gate.accept(ord("!"))
    assert gate.accept(CLOSE)
    assert not gate.may_restrict(5)
    assert mask(gate) is None
    assert feed(gate, b"anything")
    assert not gate.is_finished


def test_an_undecided_budget_counts_from_the_start_token() -> None:
    gate = make_gate(budget=1, texts=None, start=OPEN)
    assert not gate.may_restrict(1)
    assert gate.may_restrict(2)
    assert mask(gate) is None
    assert gate.accept(OPEN)
    assert mask(gate) is None
    assert gate.accept(ord("x"))
    assert mask(gate) == [ord("!")]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    gate = make_gate()
    assert gate.accept(len(TOKENS) + 7)
    assert mask(gate) is None
