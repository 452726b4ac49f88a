"""Phase 1 of 11 for pooling models: a text or a pair of them, with the special tokens around it even when it is cut."""

from __future__ import annotations

from dataclasses import dataclass

from serve.errors import InvalidRequest
from serve.renderers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PairTokens:
    """Token ids, and the index of the first one that belongs to the second text by the tokenizer's own account."""

    token_ids: list[int]
    second_start: int | None = None


def encode_pair(
    tokenizer: Tokenizer, texts: tuple[str, ...], *, add_special_tokens: bool, keep: int | None, side: str
) -> PairTokens:
    """Tokenize one text or two as one prompt.

    keep is the most tokens that remain, special ones included; of two texts the longer loses first. side is where
    the kept part of a text is: left drops from the beginning. Raises InvalidRequest when keep leaves no room for text.
    """
    if keep is not None:
        num_special = tokenizer.num_added_tokens(is_pair=len(texts) == 2) if add_special_tokens else 0
        if keep <= num_special:
            raise InvalidRequest(
                f"truncate_prompt_tokens={keep} leaves no room for text beside {num_special} special tokens; raise it",
                param="truncate_prompt_tokens",
            )
        keep -= num_special
    token_ids, type_ids = tokenizer.encode_texts(texts, add_special_tokens=add_special_tokens, keep=keep, side=side)
    return PairTokens(token_ids, type_ids.index(1) if 1 in type_ids else None)
