"""The scanner agrees with Python's json module about every text, however it is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.renderers.json_scanner import JsonScanner

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
WRITTEN = st.builds(
    json.dumps, JSON_VALUES, ensure_ascii=st.booleans(), indent=st.sampled_from([None, 1]), allow_nan=st.just(False)
)
ALPHABET = '{}[]",:\\ \n-+.0123456789eEtrufalsnbx'


def refuse(name: str) -> float:
    raise ValueError(name)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse, strict=False)
    except ValueError:
        return False
    return True


def scan(*pieces: str) -> tuple[JsonScanner, str, str]:
    """Give the scanner behind the pieces, what it passed on and what it did not read."""
    scanner = JsonScanner()
    passed = left = ""
    for piece in pieces:
        left += piece
        end, text = scanner.scan(left, 0)
        passed += text
        left = left[end:]
    return scanner, passed, left


@settings(deadline=None, derandomize=True)
@given(WRITTEN, st.text(max_size=5))
def test_a_value_ends_where_it_ends_and_is_passed_on_as_written(written: str, after: str) -> None:
    scanner, passed, left = scan(written, f" {after}")
    assert scanner.is_done
    assert (passed, left) == (written, f" {after}")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.text(ALPHABET, max_size=24)
    | st.builds(
        lambda text, at, c: text[:at] + c + text[at + 1 :], WRITTEN, st.integers(0, 40), st.sampled_from(ALPHABET)
    )
)
def test_what_is_json_is_what_python_reads(text: str) -> None:
    text = text.strip()
    scanner, passed, left = scan(f"{text} ")
    assert (scanner.is_done and left == " ") == is_json(text)
    if "\n" not in text:
        assert passed + left == f"{text} "


@settings(deadline=None, derandomize=True)
@given(WRITTEN, st.lists(st.integers(0, 200), max_size=10))
def test_cuts_do_not_matter(written: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    _, passed, left = scan(*(written[a:b] for a, b in itertools.pairwise(places)), " ")
    assert (passed, left) == (written, " ")


def test_line_breaks_inside_strings_become_escapes() -> None:
    scanner, passed, _ = scan('{"a\tb": "line\nne', 'xt\x00"}')
    assert scanner.is_done
    assert passed == '{"a\\tb": "line\\nnext\\u0000"}'


@pytest.mark.parametrize("text", ["'a'", "True", "NaN", "[1,]", '{"a" 1}', "{1: 2}", "01", "1.", "-", '"\\x"', "[}"])
def test_reading_stops_at_the_character_that_breaks_it(text: str) -> None:
    scanner, _, left = scan(f"{text} ")
    assert scanner.is_broken or left
    assert not (scanner.is_done and left == " ")


def test_depth_is_no_matter() -> None:
    scanner, _, left = scan("[" * 100_000, "]" * 100_000)
    assert scanner.is_done
    assert left == ""
