"""Incremental text equals the text decoded at once; stop strings never leak and never delay more than they must."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from serve.engine.detokenizer import IncrementalDetokenizer, NoText, StopMatcher, new_detokenizer
from serve.sampling_params import OutputKind, SamplingParams, StructuredOutputs
from tests.fakes import BOS_ID, EOS_ID, ByteTokenizer

TOKENIZER = ByteTokenizer(
    [b"hello", b" world", b"ab", b"abab", "\u00e9t\u00e9".encode(), "\U0001f600".encode(), b"\n\n"]
)
IDS = st.lists(st.integers(0, TOKENIZER.max_token_id), max_size=40)


def detokenizer(**changes: object) -> IncrementalDetokenizer:
    params = SamplingParams(output_kind=OutputKind.DELTA, **changes)  # type: ignore[arg-type]
    result = new_detokenizer(TOKENIZER, [], params)
    assert isinstance(result, IncrementalDetokenizer)
    return result


def feed(text: str, size: int, **changes: object) -> tuple[list[str], str | None]:
    """Feed text in pieces of at most size characters; give the deltas and the stop string."""
    pieces = iter([text[i : i + size] for i in range(0, len(text), size)])
    subject = IncrementalDetokenizer(
        lambda _: next(pieces),
        SamplingParams(output_kind=OutputKind.DELTA, **changes),  # type: ignore[arg-type]
    )
    deltas, stop = [], None
    for _ in range(0, len(text), size):
        stop = subject.update([0], ends_on_stop_token=False)
        deltas.append(subject.take(is_final=stop is not None))
        if stop is not None:
            return deltas, stop
    deltas.append(subject.take(is_final=True))
    return deltas, None


def first_completed(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Reference: the stop string whose match ends first; of several that end together, the one listed first."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


@settings(max_examples=150, deadline=None)
@given(token_ids=IDS, interval=st.integers(1, 7))
@example(token_ids=[0xED, 0xA0], interval=1)  # the beginning of a surrogate: no further byte makes it a character
def test_deltas_join_to_the_text_decoded_at_once(token_ids: list[int], interval: int) -> None:
    subject = detokenizer(stop=("never seen", "hellooo"))
    deltas = []
    for start in range(0, len(token_ids), interval):
        assert subject.update(token_ids[start : start + interval], ends_on_stop_token=False) is None
        deltas.append(subject.take(is_final=False))
    deltas.append(subject.take(is_final=True))
    whole = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    tail = whole[len("".join(deltas)) :]
    assert "".join(deltas) + tail == whole
    assert tail in ("", "\ufffd")  # bytes of a character that never completed


@settings(max_examples=100, deadline=None)
@given(token_ids=IDS)
def test_cumulative_text_only_grows_and_ends_equal_to_the_deltas(token_ids: list[int]) -> None:
    cumulative = new_detokenizer(TOKENIZER, [], SamplingParams(stop=("ab!",)))
    delta = detokenizer(stop=("ab!",))
    texts, deltas = [""], []
    for token_id in token_ids:
        cumulative.update([token_id], ends_on_stop_token=False)
        delta.update([token_id], ends_on_stop_token=False)
        texts.append(cumulative.take(is_final=False))
        deltas.append(delta.take(is_final=False))
    assert all(new.startswith(old) for old, new in itertools.pairwise(texts))
    assert cumulative.take(is_final=True) == "".join(deltas) + delta.take(is_final=True)


@pytest.mark.parametrize("size", range(1, 12))
def test_a_stop_string_is_found_however_the_text_is_split(size: int) -> None:
    deltas, stop = feed("one STO STOP two", size, stop=("STOP",))
    assert stop == "STOP"
    assert "".join(deltas) == "one STO "


@pytest.mark.parametrize("size", range(1, 12))
def test_include_keeps_the_stop_string_and_nothing_after_it(size: int) -> None:
    deltas, stop = feed("one STO STOP two", size, stop=("STOP",), include_stop_str_in_output=True)
    assert stop == "STOP"
    assert "".join(deltas) == "one STO STOP"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 9),
)
def test_cut_and_stop_string_do_not_depend_on_the_split(text: str, stops: tuple[str, ...], size: int) -> None:
    deltas, stop = feed(text, size, stop=stops)
    expected = first_completed(text, stops)
    if expected is None:
        assert (stop, "".join(deltas)) == (None, text)
    else:
        end, word = expected
        assert (stop, "".join(deltas)) == (word, text[: end - len(word)])


@settings(max_examples=300, deadline=None)
@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3))
def test_exactly_the_longest_beginning_of_a_stop_string_is_withheld(text: str, stops: list[str]) -> None:
    pieces = iter(text)
    subject = IncrementalDetokenizer(
        lambda _: next(pieces), SamplingParams(output_kind=OutputKind.DELTA, stop=tuple(stops))
    )
    shown = ""
    for position in range(len(text)):
        if subject.update([0], ends_on_stop_token=False) is not None:
            break
        shown += subject.take(is_final=False)
        so_far = text[: position + 1]
        suffixes = (so_far[cut:] for cut in range(len(so_far)))
        longest = next((s for s in suffixes if any(stop.startswith(s) for stop in stops)), "")
        assert shown + longest == so_far


def test_of_two_stop_strings_that_end_together_the_first_listed_wins() -> None:
    for size in (1, 2, 3, 20):
        deltas, stop = feed("xyzab", size, stop=("b", "ab"))
        assert ("".join(deltas), stop) == ("xyza", "b")
        deltas, stop = feed("xyzab", size, stop=("ab", "b"))
        assert ("".join(deltas), stop) == ("xyz", "ab")


def test_withheld_text_is_released_as_soon_as_it_cannot_match() -> None:
    deltas, stop = feed("aEN!", 1, stop=("END",))
    assert stop is None
    assert deltas == ["a", "", "", "EN!", ""]


def test_withheld_text_is_flushed_at_the_end() -> None:
    subject = detokenizer(stop=("END",))
    subject.update(list(b"the EN"), ends_on_stop_token=False)
    assert subject.take(is_final=False) == "the "
    assert subject.take(is_final=True) == "EN"


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    deltas, stop = feed("a.b.c.", 1, stop=(".",), min_tokens=3)
    assert stop == "."
    assert "".join(deltas) == "a.b"


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=4), min_tokens=st.integers(0, 20))
def test_min_tokens_counts_matches_that_end_after_it(text: str, stop: str, min_tokens: int) -> None:
    deltas, found = feed(text, 1, stop=(stop,), min_tokens=min_tokens)
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(stop)]
    assert (found is not None) == bool(ends)
    assert "".join(deltas) == (text[: ends[0] - len(stop)] if ends else text)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_shows_only_with_include(include: bool) -> None:
    subject = detokenizer(include_stop_str_in_output=include, skip_special_tokens=False)
    subject.update([*b"hi", EOS_ID], ends_on_stop_token=True)
    assert subject.take(is_final=True) == ("hi<eos>" if include else "hi")


def test_last_token_of_a_complete_grammar_is_text_and_a_stop_token_after_it_is_not() -> None:
    constraint = StructuredOutputs("choice", '["hi"]')
    for ids in (list(b"hi"), [*b"hi", EOS_ID]):
        subject = detokenizer(structured_outputs=constraint, all_stop_token_ids=(EOS_ID,))
        subject.update(ids, ends_on_stop_token=True)
        assert subject.take(is_final=True) == "hi"


def test_special_tokens_show_only_when_asked_for() -> None:
    hidden, shown = detokenizer(), detokenizer(skip_special_tokens=False)
    for subject in (hidden, shown):
        subject.update([97, EOS_ID, 98], ends_on_stop_token=False)
    assert hidden.take(is_final=True) == "ab"
    assert shown.take(is_final=True) == "a<eos>b"


def test_special_tokens_that_a_parser_must_see_keep_their_text() -> None:
    subject = detokenizer(visible_token_ids=(BOS_ID,))
    subject.update([97, EOS_ID, BOS_ID, 98], ends_on_stop_token=False)
    assert subject.take(is_final=True) == "a<bos>b"


def test_a_character_split_over_tokens_appears_whole() -> None:
    subject = detokenizer()
    deltas = []
    for byte in "x\U0001f600y".encode():
        subject.update([byte], ends_on_stop_token=False)
        deltas.append(subject.take(is_final=False))
    assert deltas == ["x", "", "", "", "\U0001f600", "y"]


def test_without_detokenize_there_is_no_text() -> None:
    subject = new_detokenizer(TOKENIZER, [], SamplingParams(detokenize=False))
    assert isinstance(subject, NoText)
    assert subject.update([97], ends_on_stop_token=False) is None
    assert subject.take(is_final=True) == ""


def test_stop_search_takes_linear_time() -> None:
    """The worst text for a naive search: each position begins a long near-match. Counted, not timed."""

    class CountingStr(str):
        comparisons = 0

        def __getitem__(self, key: object) -> str:  # type: ignore[override]
            CountingStr.comparisons += 1
            return str.__getitem__(self, key)  # type: ignore[index]

    matcher = StopMatcher((CountingStr("a" * 500 + "b"),))
    CountingStr.comparisons = 0
    for _ in range(5000):
        assert matcher.feed("a", counts=True) is None
    assert CountingStr.comparisons <= 4 * 5000
    assert matcher.longest_prefix == 500
    assert matcher.feed("b", counts=True) == (1, "a" * 500 + "b")
