"""Incremental text: the same as decoding at once, without half characters."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serve.renderers.backend import TokenizerParts
from serve.renderers.decode_stream import Utf8Stream, WindowDecodeStream, byte_fallback_bytes, byte_level_bytes
from serve.renderers.tokenizer import FastTokenizer
from tests.unit.renderers.samples import varied_texts

PROMPT = "prompt:"


def streamed(tokenizer: FastTokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> str:
    stream = tokenizer.new_decode_stream(prompt, skip_special_tokens=skip)
    return "".join(text for i in output if (text := stream.step(i)) is not None)


def whole_text(tokenizer: FastTokenizer, token_ids: Sequence[int], skip_ids: frozenset[int]) -> str:
    """UTF-8 of the joined bytes by Python's own decoder, without a character that never completes."""
    raw = b"".join(tokenizer.token_to_bytes(i) for i in token_ids if i not in skip_ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def test_stream_equals_one_decode_for_real_text(bpe: FastTokenizer) -> None:
    prompt = bpe.encode(PROMPT, add_special_tokens=True)
    for text in varied_texts():
        output = bpe.encode(text, add_special_tokens=False)
        assert streamed(bpe, prompt, output) == text


@settings(max_examples=300, deadline=None)
@given(output=st.lists(st.integers(0, 700), max_size=40), skip=st.booleans())
def test_stream_of_any_ids_equals_the_library_up_to_an_open_tail(
    bpe: FastTokenizer, output: list[int], skip: bool
) -> None:
    text = streamed(bpe, bpe.encode(PROMPT, add_special_tokens=False), output, skip=skip)
    at_once = bpe.decode(output, skip_special_tokens=skip)
    assert at_once.startswith(text)
    assert at_once[len(text) :] in ("", "\ufffd")


def test_long_random_id_sequence_equals_the_utf8_of_its_bytes(bpe: FastTokenizer) -> None:
    rng = random.Random(11)
    output = [rng.randrange(701) for _ in range(100_000)]
    text = streamed(bpe, [5], output)
    assert text == whole_text(bpe, output, bpe.all_special_ids)


def test_no_piece_holds_a_fragment_of_an_emoji(bpe: FastTokenizer) -> None:
    emoji = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    stream = bpe.new_decode_stream([5], skip_special_tokens=True)
    single_bytes = [bpe.token_to_id(bpe_char(b)) for b in emoji.encode()]
    pieces = [stream.step(i) for i in single_bytes if i is not None]
    assert [p for p in pieces if p] == list(emoji)


def bpe_char(byte: int) -> str:
    """The byte-level spelling of one byte, by the tokenizers library."""
    return next(c for c in pre_tokenizers.ByteLevel.alphabet() if byte_level_bytes(c) == bytes([byte]))


def test_byte_table_is_the_librarys() -> None:
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for text in varied_texts(100):
        spelled = "".join(piece for piece, _ in encode(text))
        assert byte_level_bytes(spelled) == text.encode()


# Both ends of every range of table 3-7 of the Unicode standard, and the bytes just outside.
EDGE_BYTES = bytes.fromhex("00 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
CONTINUATIONS = [bytes(s) for n in range(4) for s in itertools.product((0x80, 0x90, 0xA0), repeat=n)]


def certain_text(raw: bytes) -> str:
    """Reference: the text that all ways to go on have in common, decoded at once."""
    texts = [(raw + more).decode("utf-8", errors="replace") for more in CONTINUATIONS]
    same = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False))
    return "".join(chars[0] for chars in same)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    for length in (1, 2, 3):
        for raw in map(bytes, itertools.product(EDGE_BYTES, repeat=length)):
            stream = Utf8Stream()
            assert "".join(stream.decode(bytes([b])) for b in raw) == certain_text(raw), raw.hex(" ")


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.lists(st.sampled_from(EDGE_BYTES), max_size=5).map(bytes), max_size=8))
def test_pieces_give_the_text_of_the_joined_bytes_up_to_an_open_tail(pieces: list[bytes]) -> None:
    stream = Utf8Stream()
    text = "".join(map(stream.decode, pieces))
    at_once = b"".join(pieces).decode("utf-8", errors="replace")
    assert at_once == text + ("\ufffd" if stream.has_open_bytes else "")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xff", "\ufffd"),
        (b"\xed\xa0", "\ufffd\ufffd"),
        (b"\xed\xa0\x80A", "\ufffd\ufffd\ufffdA"),
        (b"\xe0\x9f", "\ufffd\ufffd"),
        (b"\xf0\x8f", "\ufffd\ufffd"),
        (b"\xf4\x90", "\ufffd\ufffd"),
        (b"\xc0\xc1\xf5", "\ufffd\ufffd\ufffd"),
        (b"\xffA", "\ufffdA"),
        (b"\xe2\x82A", "\ufffdA"),
        (b"\xe2\x82\xac", "\u20ac"),
        (b"\xf0\x9f\x99", ""),
        (b"\xc3\xc3\xa9", "\ufffd\u00e9"),
    ],
)
def test_bytes_that_cannot_be_valid_are_replaced_at_once(bpe: FastTokenizer, raw: bytes, expected: str) -> None:
    ids = [bpe.token_to_id(bpe_char(b)) for b in raw]
    assert streamed(bpe, [5], [i for i in ids if i is not None]) == expected


def test_character_that_begins_in_the_prompt_is_completed(bpe: FastTokenizer) -> None:
    ids = [i for b in "\u20ac".encode() if (i := bpe.token_to_id(bpe_char(b))) is not None]
    assert streamed(bpe, [*bpe.encode("x", add_special_tokens=False), *ids[:2]], ids[2:]) == "\u20ac"


def test_character_broken_off_in_the_prompt_leaves_nothing_in_the_output(bpe: FastTokenizer) -> None:
    ids = [i for b in "\u20ac".encode() if (i := bpe.token_to_id(bpe_char(b))) is not None]
    assert streamed(bpe, ids[:2], bpe.encode("abc", add_special_tokens=False)) == "abc"


def test_special_tokens_show_only_when_asked_for(bpe: FastTokenizer) -> None:
    output = [1, *bpe.encode("hi", add_special_tokens=False), 2]
    assert streamed(bpe, [5], output) == "hi"
    assert streamed(bpe, [5], output, skip=False) == "<|im_start|>hi<|im_end|>"


def test_ids_without_a_token_give_no_text(bpe: FastTokenizer) -> None:
    assert streamed(bpe, [5], [-1, 100_000, 2**40]) == ""


def test_sentencepiece_output_continues_the_joined_text(spm: FastTokenizer) -> None:
    for text in varied_texts(100):
        whole = spm.encode(f"{PROMPT} {text}", add_special_tokens=True)
        prompt = spm.encode(PROMPT, add_special_tokens=True)
        if whole[: len(prompt)] != prompt or "\ufffd" in spm.decode(whole, skip_special_tokens=True):
            continue
        assert PROMPT + streamed(spm, prompt, whole[len(prompt) :]) == f"{PROMPT} {text}"


def test_first_space_is_dropped_only_at_the_start_of_the_text(spm: FastTokenizer) -> None:
    hello = spm.encode("hello", add_special_tokens=False)
    assert streamed(spm, [1], hello) == "hello"
    assert streamed(spm, hello, hello) == " hello"
    assert streamed(spm, [1], hello, skip=False) == " hello"


def test_byte_tokens_join_to_characters(spm: FastTokenizer) -> None:
    ids = [i for b in "\U0001f642".encode() if (i := spm.token_to_id(f"<0x{b:02X}>")) is not None]
    assert len(ids) == 4
    stream = spm.new_decode_stream([5], skip_special_tokens=True)
    assert [stream.step(i) for i in ids] == [None, None, None, "\U0001f642"]


def test_bytes_of_single_tokens() -> None:
    spelled = ("\u2581the", "<0x0A>", "<0xZZ>", "a")
    assert [byte_fallback_bytes(t) for t in spelled] == [b" the", b"\n", b"<0xZZ>", b"a"]


def test_tokenizer_without_a_per_token_rule_streams_by_window() -> None:
    vocab = {"[UNK]": 0, "he": 1, "##llo": 2, "world": 3, ",": 4}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = FastTokenizer(TokenizerParts(backend))
    stream = tokenizer.new_decode_stream([3], skip_special_tokens=True)
    assert isinstance(stream, WindowDecodeStream)
    assert "".join(stream.step(i) or "" for i in (1, 2, 4, 3)) == " hello, world"


def test_visible_special_tokens_keep_their_text(bpe: FastTokenizer) -> None:
    start, end = bpe.token_to_id("<|im_start|>"), bpe.token_to_id("<|im_end|>")
    assert start is not None
    assert end is not None
    stream = bpe.new_decode_stream([end], skip_special_tokens=True, visible_token_ids=(start,))
    hello = bpe.encode("hello", add_special_tokens=False)
    assert (
        "".join(stream.step(i) or "" for i in (start, *hello, end, *hello, start))
        == "<|im_start|>hellohello<|im_start|>"
    )


@pytest.mark.parametrize("visible", [(), (5,), (5, 6)])
def test_visible_special_tokens_keep_their_text_in_a_window(visible: tuple[int, ...]) -> None:
    vocab = {"[UNK]": 0, "he": 1, "##llo": 2, "world": 3, ",": 4}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[A]", "[B]"])
    stream = FastTokenizer(TokenizerParts(backend)).new_decode_stream(
        [5, 3], skip_special_tokens=True, visible_token_ids=visible
    )
    assert isinstance(stream, WindowDecodeStream)
    output = [5, 1, 2, 6, 3, 6, 5]
    shown = [i for i in output if i < 5 or i in visible]
    expected = backend.decode([3, *shown], skip_special_tokens=False).removeprefix("world")
    assert "".join(stream.step(i) or "" for i in output) == expected
