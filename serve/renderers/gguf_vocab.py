"""Builds a tokenizer from the vocabulary inside a GGUF file.

Two kinds: "gpt2" is byte-level BPE with the file's merges and a named split rule; "llama" is SentencePiece BPE,
whose merges follow from the scores. Sources: the GGUF specification, and the split rules as the models publish
them in their tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError, ExitCode
from serve.renderers.backend import LibraryErrors, TokenizerParts, set_added_ends

_TOKEN_UNKNOWN: Final = 2
_TOKEN_CONTROL: Final = 3
_TOKEN_USER_DEFINED: Final = 4
_TOKEN_BYTE: Final = 6
_METASPACE: Final = "\u2581"
# Finding the merges of a token takes time with the square of its length; real ones have at most 64 characters.
_MAX_SCORED_TOKEN_CHARS: Final = 1024

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*" r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O: Final = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a byte-level vocabulary cuts text before merging: patterns, one after the other on the pieces left.

    ignore_merges: a piece that is a token as a whole stays whole. adds_bos: when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGIT_THEN_GPT2: Final = SplitRule((r"\p{N}", _GPT2))
_LLAMA3_RULE: Final = SplitRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN2_RULE: Final = SplitRule((_QWEN2,), nfc=True)

# tokenizer.ggml.pre to its rule; "default" is also what a file without the key gets.
SPLIT_RULES: Final[dict[str, SplitRule]] = {
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": SplitRule((_GPT2,)),
    "mpt": SplitRule((_GPT2,)),
    "olmo": SplitRule((_GPT2,)),
    "phi-2": SplitRule((_GPT2,)),
    "smollm": _DIGIT_THEN_GPT2,
    "starcoder": _DIGIT_THEN_GPT2,
    "refact": _DIGIT_THEN_GPT2,
    "codeshell": _DIGIT_THEN_GPT2,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "dbrx": SplitRule((_LLAMA3,)),
    "smaug-bpe": SplitRule((_LLAMA3,)),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "stablelm2": SplitRule((_QWEN2,)),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": SplitRule((_GPT4O,)),
    "llama4": SplitRule((_GPT4O,)),
}

_T = TypeVar("_T")


@dataclass(slots=True)
class _Vocabulary:
    """The tokenizer.ggml keys of one file, with their types checked."""

    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)


def build_gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the tokenizer that a GGUF header describes.

    Raises ConfigError (exit code MODEL) when there is no vocabulary, its kind or split rule is unknown, or its
    tables contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise _bad("has no vocabulary (tokenizer.ggml.model is missing)")
    vocabulary = _Vocabulary(
        tokens=_list(metadata, "tokens", str),
        types=_list(metadata, "token_type", int),
        scores=_list(metadata, "scores", float),
        merges=_list(metadata, "merges", str),
    )
    if not vocabulary.tokens:
        raise _bad("has an empty vocabulary")
    vocabulary.types = vocabulary.types or [1] * len(vocabulary.tokens)
    if len(vocabulary.types) != len(vocabulary.tokens):
        raise _bad(f"lists {len(vocabulary.tokens)} tokens but {len(vocabulary.types)} token types")
    special = _special_tokens(metadata, vocabulary)
    with LibraryErrors("the vocabulary of the GGUF file cannot be used"):
        if kind == "gpt2":
            rule = _split_rule(metadata)
            backend, adds_bos = _byte_level(vocabulary, rule), rule.adds_bos
        elif kind == "llama":
            has_prefix = _flag(metadata, "add_space_prefix", default=True)
            backend, adds_bos = _sentencepiece(vocabulary, special, has_prefix=has_prefix), True
        else:
            raise _bad(f"has a vocabulary of kind {kind!r}; supported: gpt2, llama")
        _add_tokens(backend, vocabulary)
        bos = special.get("bos_token") if _flag(metadata, "add_bos_token", default=adds_bos) else None
        eos = special.get("eos_token") if _flag(metadata, "add_eos_token", default=False) else None
        set_added_ends(backend, bos, eos)
    return TokenizerParts(backend=backend, special_tokens=special, chat_template=_chat_templates(metadata))


def _bad(what: str) -> ConfigError:
    return ConfigError(f"the GGUF file {what}; pass --tokenizer with a folder of tokenizer files", ExitCode.MODEL)


def _list(metadata: Mapping[str, object], name: str, item_type: type[_T]) -> list[_T]:
    """Give a tokenizer.ggml list, [] when absent."""
    items = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(items, list) or (items and not isinstance(items[0], item_type)):
        raise _bad(f"has a tokenizer.ggml.{name} that is not a list of {item_type.__name__}")
    return cast("list[_T]", items)


def _flag(metadata: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise _bad(f"has a tokenizer.ggml.{name} that is not a boolean")
    return value


def _split_rule(metadata: Mapping[str, object]) -> SplitRule:
    name = metadata.get("tokenizer.ggml.pre", "default")
    rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise _bad(f"names the split rule {name!r}, which is not supported (known: {', '.join(SPLIT_RULES)})")
    return rule


def _special_tokens(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> dict[str, str]:
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
            raise _bad(f"has tokenizer.ggml.{key}_token_id {token_id} outside its {len(vocabulary.tokens)} tokens")
        found[f"{name}_token"] = vocabulary.tokens[token_id]
    return found


def _byte_level(vocabulary: _Vocabulary, rule: SplitRule) -> Backend:
    merges = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated", invert=False) for p in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, special: dict[str, str], *, has_prefix: bool) -> Backend:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise _bad(f"lists {len(vocabulary.tokens)} tokens but {len(vocabulary.scores)} scores")
    longest = max(map(len, vocabulary.tokens))
    if longest > _MAX_SCORED_TOKEN_CHARS:
        raise _bad(f"has a token of {longest} characters; at most {_MAX_SCORED_TOKEN_CHARS} are possible")
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _TOKEN_UNKNOWN), None
    )
    bpe = models.BPE(
        vocab=vocab,
        merges=merges_from_scores(vocabulary.tokens, vocabulary.scores, vocabulary.types),
        unk_token=special.get("unk_token", unknown),
        fuse_unk=True,
        byte_fallback=_TOKEN_BYTE in vocabulary.types,
    )
    backend = Backend(bpe)
    to_metaspace = normalizers.Replace(" ", _METASPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_METASPACE), to_metaspace]) if has_prefix else to_metaspace
    )
    steps = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Recover BPE merges from SentencePiece scores: of two adjacent pieces, the pair with the best score joins first.

    Every way to make a token of two others is a merge; control, unknown and byte tokens take no part.
    """
    skipped = (_TOKEN_UNKNOWN, _TOKEN_CONTROL, _TOKEN_BYTE)
    rank = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in skipped}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in rank.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in rank and right in rank:
                found.append((-scores[i], rank[left], rank[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Make control tokens special and user-defined ones whole, with the ids they have in the vocabulary."""
    special = (_TOKEN_CONTROL, _TOKEN_UNKNOWN)
    pairs = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in special])
    user = [AddedToken(t, special=False, normalized=False) for t, kind in pairs if kind == _TOKEN_USER_DEFINED]
    backend.add_tokens(user)


def _chat_templates(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    main = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, str)}
    if not named:
        return main if isinstance(main, str) else None
    if isinstance(main, str):
        named["default"] = main
    return named
