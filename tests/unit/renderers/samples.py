"""Text that tokenizers get wrong: 300 strings from a fixed seed, and chats of every shape."""

from __future__ import annotations

import random

_PIECES = (
    "hello",
    "World",
    "don't",
    "I'LL",
    "we've",
    "12345",
    "3.14",
    "1,000",
    "x=1",
    "snake_case",
    "camelCase",
    "HTTPServer",
    "def f(a, b):",
    "return a+b;",
    "{'k': [1, 2]}",
    "<p>hi</p>",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u3053\u3093\u306b\u3061\u306f",
    "\ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "caf\u00e9",
    "cafe\u0301",
    "na\u00efve",
    "stra\u00dfe",
    "\U0001f642",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1eb\U0001f1f7",
    "\u2014",
    "\u2026",
    "\u00bd",
    "\u2167",
    "\u0661\u0662\u0663",
    "...",
    "!?",
    "$$$",
    "//",
    "\\n",
    "\x00",
    "\u00a0",
    "\u200b",
    "aaaaaaaaaaaaaaaa",
    "========",
)
_GAPS = ("", "", " ", " ", " ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n    ", "\u3000")


def varied_texts(count: int = 300, seed: int = 7) -> list[str]:
    """Strings of mixed scripts, digits, code, emoji and whitespace runs; the same ones for the same seed."""
    rng = random.Random(seed)
    texts = ["", " ", "  ", "\n", "a", " a", "a ", "  a  b  "]
    while len(texts) < count:
        words = rng.choices(_PIECES, k=rng.randint(1, 12))
        texts.append("".join(rng.choice(_GAPS) + word for word in words) + rng.choice(_GAPS))
    return texts
