"""The grammar library behind our seam: which texts each kind of constraint lets through, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from serve.core.structured_output.backend import LLGuidanceBackend, LLGuidanceGrammar
from serve.errors import InvalidRequest
from serve.sampling_params import ConstraintKind, StructuredOutputs
from serve.wire.frontend import SetVocabulary
from tests.unit.core.structured_output.fakes import allowed_ids

EOS = 256
SPECIAL = 257
WORDS = (b'{"', b'":', b"  ", b"true", b"hello", b"\xc3\xa9t\xc3\xa9", b"</", b"", b"com")
TOKENS = [*(bytes([i]) for i in range(256)), b"<eos>", b"<|mark|>", *WORDS]
BACKEND = LLGuidanceBackend(SetVocabulary(TOKENS, [SPECIAL], [EOS]))
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def compile_(kind: ConstraintKind, spec: object = "", **options: object) -> LLGuidanceGrammar:
    text = spec if isinstance(spec, str) else json.dumps(spec)
    return BACKEND.compile(StructuredOutputs(kind, text, **options))  # type: ignore[arg-type]


def mask(grammar: LLGuidanceGrammar) -> set[int]:
    row = np.zeros(BACKEND.mask_words, np.uint32)
    grammar.fill(row)
    return set(allowed_ids(row))


def accepts(grammar: LLGuidanceGrammar, text: str) -> bool:
    """True when every byte of the text is allowed in turn and the text may end there."""
    for byte in text.encode():
        if byte not in mask(grammar):
            return False
        assert grammar.accept(byte)
    return grammar.is_finished or EOS in mask(grammar)


@pytest.mark.parametrize(
    ("kind", "spec", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, {}]}', "{}"], ["[1]", "1", '{"a": 1} ', " {}"]),
        (
            "json_schema",
            PERSON,
            ['{"a": 5}', '{"a":5,"b":"x"}', '{\n "a"\t: 5  }'],
            ['{"b": 1}', '{"a": "x"}', '{"a":   5}'],
        ),
        ("json_schema", True, ["12", '"x"'], ["x"]),
        ("json_schema", {"enum": ["x", 3]}, ['"x"', "3"], ["4", '"y"']),
        ("json_schema", {"type": "string", "pattern": "^a/b+$"}, ['"a/bb"'], ['"a/"']),
        (
            "json_schema",
            {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
            ['{"k": "b"}'],
            ['{"k": "c"}'],
        ),
        ("regex", r"[a-z/]+@\d{2}", ["a/b@12"], ["a@1", "@12", "a@123", "a@\N{ARABIC-INDIC DIGIT ONE}2"]),
        ("regex", r"[\d.]+", ["1.2"], ["x"]),
        ("regex", "^(a|b)$", ["a", "b"], ["ab"]),
        ("regex", "a\nb", ["a\nb"], ["anb"]),
        ("regex", "com", ["com"], ["co"]),
        (
            "choice",
            ["yes", 'no, "never"', "été", "yesterday"],
            ["yes", 'no, "never"', "été", "yesterday"],
            ["ye", "no"],
        ),
        ("grammar", 'start: A B?\nA: /[a-c]+/\nB: "!"', ["ab!", "c"], ["!", "d"]),
        ("grammar", '%llguidance {"no_forcing": false}\nstart: "com"', ["com"], ["c"]),
        (
            "grammar",
            'root ::= item ("," item)*\nitem ::= [0-9]+ | "x-" y\ny ::= "q"',
            ["1,22", "x-q", "3,x-q"],
            ["1,", "y"],
        ),
        ("grammar", 'root ::= "(" root ")" | [^()/] # all\n', ["((a))", "b"], ["()", "(a", "/"]),
        ("grammar", 'root ::= "a"{2,3} b+ .\nb ::= "b" | "ba"', ["aabx", "aaabab."], ["abx", "aab"]),
        ("grammar", 'root ::=\n  my-Word\nmy-Word ::= "\\"" [a\\-]+ "\\""', ['"a-"'], ['""']),
    ],
)
def test_texts_of_a_constraint_pass_and_others_do_not(
    kind: ConstraintKind, spec: object, good: list[str], bad: list[str]
) -> None:
    grammar = compile_(kind, spec)
    for text in good:
        assert accepts(grammar.copy(), text), text
    for text in bad:
        assert not accepts(grammar.copy(), text), text


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"disable_any_whitespace": True}, '{"a": 5}', '{"a":5}'),
        ({"disable_additional_properties": True}, '{"a": 5}', '{"a": 5, "b": 1}'),
        ({"whitespace_pattern": " ?"}, '{"a": 5}', '{"a":\n5}'),
    ],
)
def test_options_of_json(options: dict[str, object], good: str, bad: str) -> None:
    grammar = compile_("json_schema", PERSON, **options)
    assert accepts(grammar.copy(), good)
    assert not accepts(grammar.copy(), bad)


def test_closing_a_schema_keeps_what_it_says_itself() -> None:
    inner = {"type": "object", "properties": {"x": {}}, "additionalProperties": {"type": "integer"}}
    grammar = compile_(
        "json_schema",
        {"type": "object", "properties": {"in": inner}, "required": ["in"]},
        disable_additional_properties=True,
    )
    assert accepts(grammar.copy(), '{"in": {"y": 3}}')
    assert not accepts(grammar.copy(), '{"in": {}, "y": 3}')


def test_closing_a_schema_takes_no_name_and_no_value_for_a_schema() -> None:
    named = {"type": "object", "properties": {"properties": {"type": "integer"}}, "required": ["properties"]}
    grammar = compile_("json_schema", named, disable_additional_properties=True)
    assert accepts(grammar.copy(), '{"properties": 1}')
    assert not accepts(grammar.copy(), '{"properties": 1, "additionalProperties": 1}')
    fixed = compile_("json_schema", {"const": {"properties": {}}}, disable_additional_properties=True)
    assert accepts(fixed, '{"properties": {}}')


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("json_schema", {"not": {}}, ['"not"', "not supported"]),
        ("json_schema", {"type": "array", "uniqueItems": True}, ['"uniqueItems"']),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}, ["look-around"]),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf", "anyOf"]),
        ("json_schema", {"$ref": "#/$defs/x"}, ["/$defs/x"]),
        ("json_schema", False, ["false"]),
        ("json_schema", [1], ["object"]),
        ("json_schema", '{"a', ["not valid JSON"]),
        (
            "json_schema",
            {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(40)]},
            ["40 patterns", "14"],
        ),
        ("json_schema", {"patternProperties": {f"^{i}$": {} for i in range(101)}}, ["101 patternProperties", "100"]),
        ("regex", "[a", ["unclosed character class"]),
        ("regex", r"(a)\1", ["backreferences"]),
        ("choice", "[]", ["non-empty list"]),
        ("choice", [1], ["list of strings"]),
        ("grammar", "start: foo", ["line 1", "foo"]),
        ("grammar", 'start: "a\n', ["line 1"]),
        ("grammar", "start: A\nA: " + " & ".join(["/a.*/"] * 18), ["17 operators", "14"]),
        ("grammar", "", ["root", "start"]),
        ("grammar", 'rot ::= "a"', ["root"]),
        ("grammar", "root ::= other", ["line 1", "'other'"]),
        ("grammar", 'root ::= "a"\nx ::= ("b"', ["line 2", "bracket"]),
        ("grammar", 'root ::= "a" )', ["bracket"]),
        ("grammar", 'root ::= "a"\n\nroot ::= "b"', ["'root' twice", "line 3"]),
        ("grammar", 'root ::= "a"**', ["'*'"]),
        ("grammar", 'root ::= * "a"', ["'*'"]),
        ("grammar", "root ::= ", ["empty"]),
        ("grammar", '"a" root ::= "b"', ["before any rule"]),
        ("grammar", "root ::= $", ["line 1", "'$'"]),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    kind: ConstraintKind, spec: object, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_(kind, spec)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "guidance" not in message
    assert "http" not in message


def test_refusals_never_show_the_text_around_them() -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_("json_schema", {"type": "object", "properties": {"secret": {"not": {}}}})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_special_tokens_and_tokens_without_bytes_are_never_allowed_as_text() -> None:
    row = mask(compile_("regex", "(.|\n)*"))
    assert EOS in row
    assert SPECIAL not in row
    assert TOKENS.index(b"") not in row
    assert {ord("a"), TOKENS.index(b"hello")} <= row


def test_special_tokens_can_be_named_in_a_grammar() -> None:
    grammar = compile_("grammar", 'start: <|mark|> "x"')
    assert mask(grammar) == {SPECIAL}
    assert grammar.accept(SPECIAL)
    assert mask(grammar) == {ord("x")}


def test_every_way_to_cut_a_word_into_tokens_stays_open() -> None:
    grammar = compile_("choice", ["hello", "hex"])
    assert mask(grammar) == {ord("h"), TOKENS.index(b"hello")}


def test_a_finished_grammar_says_so_before_an_end_token() -> None:
    grammar = compile_("choice", ["a", "ab"])
    assert grammar.accept(ord("a"))
    assert not grammar.is_finished
    assert mask(grammar) == {EOS, ord("b")}
    assert grammar.accept(ord("b"))
    assert grammar.is_finished


def test_a_token_that_does_not_fit_is_not_accepted_and_nothing_is_finished() -> None:
    grammar = compile_("choice", ["a"])
    assert not grammar.accept(ord("b"))
    assert not grammar.is_finished
    with pytest.raises(InvalidRequest, match="cannot be followed further"):
        mask(grammar)


def test_copies_are_independent() -> None:
    grammar = compile_("choice", ["ab"])
    copy = grammar.copy()
    assert copy.accept(ord("a"))
    assert mask(grammar) == {ord("a")}
    assert mask(copy) == {ord("b")}


def test_tokens_are_counted_without_a_move_and_taken_back() -> None:
    grammar = compile_("regex", "[0-9]{3}x")
    digits = [ord(char) for char in "12a"]
    assert grammar.count_valid(digits) == 2
    assert grammar.accept(digits[0])
    assert grammar.accept(digits[1])
    grammar.rollback(1)
    assert grammar.count_valid([ord(char) for char in "34x"]) == 2 + 1
    with pytest.raises(AssertionError):
        grammar.rollback(5)


def test_the_rest_of_a_token_moves_only_when_it_fits() -> None:
    grammar = compile_("regex", '\\{"a": hello')
    assert not grammar.accept_text(b"}")
    assert grammar.accept_text(b'{"a')
    assert mask(grammar) == {ord('"'), TOKENS.index(b'":')}
    assert not grammar.accept_text(b'": x')
    assert grammar.accept_text(b'": hello')
    assert grammar.is_finished


def test_without_end_tokens_an_answer_goes_on_until_nothing_can_follow() -> None:
    backend = LLGuidanceBackend(SetVocabulary([b"a", b"b"], [], []))
    # The library's own end token lies beyond the vocabulary.
    assert backend.end_token_ids == (2,)
    grammar = backend.compile(StructuredOutputs("regex", "ab*"))
    row = np.zeros(backend.mask_words, np.uint32)
    assert grammar.accept(0)
    grammar.fill(row)
    assert allowed_ids(row) == [1, 2]


def test_several_end_tokens_are_allowed_together() -> None:
    backend = LLGuidanceBackend(SetVocabulary([b"a", b"<1>", b"<2>"], [], [2, 1]))
    grammar = backend.compile(StructuredOutputs("regex", "a*"))
    row = np.zeros(backend.mask_words, np.uint32)
    grammar.fill(row)
    assert allowed_ids(row) == [0, 1, 2]


TAGS = {
    "structures": [
        {"begin": "<f=get>", "schema": PERSON, "end": "</f>"},
        {"begin": "<f=put>", "schema": {}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (TAGS, ["none", 'a <f=get>{"a": 1}</f> b <f=put>[]</f>', ""], ["a <f=x>", '<f=get>{"b": 1}</f>', "<f=put>1"]),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "const_string", "value": "x "}, {"type": "regex", "pattern": "[0-9]+"}],
                }
            },
            ["x 12"],
            ["x ", "x y"],
        ),
        (
            {"format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}},
            ["<t>a < b</t>", "<t></t>"],
            ["<t>a", "a", "<t>a</t>b"],
        ),
        (
            {
                "format": {
                    "type": "or",
                    "elements": [
                        {"type": "json_schema", "json_schema": PERSON},
                        {"type": "grammar", "grammar": 'root ::= "g" r0\nr0 ::= "1"'},
                    ],
                }
            },
            ['{"a": 1}', "g1"],
            ["g"],
        ),
        (
            {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "tags": [{"begin": "[", "content": {"type": "regex", "pattern": "[a-z]"}, "end": "]"}],
                }
            },
            ["", "[a]", "[a], [b]"],
            ["[a],", "[ab]"],
        ),
        (
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}],
                }
            },
            ["t <a>x</a>"],
            ["t", "<b>", "<a>x</a> more"],
        ),
    ],
)
def test_structural_tags(spec: dict[str, object], good: list[str], bad: list[str]) -> None:
    grammar = compile_("structural_tag", spec)
    for text in good:
        assert accepts(grammar.copy(), text), text
    for text in bad:
        assert not accepts(grammar.copy(), text), text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([], ["JSON object"]),
        ({}, ['"format"', '"structures"']),
        ({"format": {"type": "foo"}}, ["'foo'", "const_string"]),
        ({"format": 3}, ["object"]),
        ({"format": {"type": "tag", "begin": "a"}}, ['"end"']),
        ({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}}, ["non-empty"]),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}, ["'<a>'", "triggers"]),
        ({"structures": [3], "triggers": ["<b"]}, ["structures"]),
        ({"structures": [], "triggers": ["<b"]}, ['"structures"', "non-empty"]),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}]}, ['"triggers"']),
        ({"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}] * 300}}, ["256"]),
    ],
)
def test_structural_tags_that_are_refused(spec: object, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_("structural_tag", spec)
    assert all(word in str(caught.value) for word in words), str(caught.value)
