"""How a request to a pooling model (embeddings, classes, scores) turns its tokens into one result."""

from __future__ import annotations

from typing import Literal

import msgspec

# embed: one vector a prompt; classify: one row of class scores a prompt; the token_ kinds: one row for each token.
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pooling settings of one request, complete and checked.

    dimensions: leading elements to keep of an embedding before it is normalised, None for all. use_activation:
    bring an embedding to length 1, or turn class scores into probabilities; None for the model's own habit.
    second_text_start: index of the first prompt token that belongs to the second text of a pair, None without one.
    """

    task: PoolingTask = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    second_text_start: int | None = None
