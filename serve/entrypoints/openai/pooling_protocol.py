"""Bodies of the requests to pooling models: embeddings, classes, scores of pairs, and raw pooler output."""

from __future__ import annotations

import logging
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.entrypoints.openai.fields import AtMost, Int, Objects, Options
from serve.errors import InvalidRequest
from serve.log import log_once
from serve.pooling_params import PoolingTask

log = logging.getLogger(__name__)

_RENAMED: Final = {
    "normalize": "use_activation",
    "softmax": "use_activation",
    "activation": "use_activation",
    "additional_data": "input",
}
_MAX_TEXTS: Final = 1 << 16


class PoolingBody(BaseModel):
    """The fields that all these requests share. Absent and null mean the same: the default."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: Int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""
        if self.truncate_prompt_tokens is not None and (
            self.truncate_prompt_tokens < -1 or self.truncate_prompt_tokens == 0
        ):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {self.truncate_prompt_tokens}",
                param="truncate_prompt_tokens",
            )
        for name in self.model_extra or {}:
            if name in _RENAMED:
                raise InvalidRequest(f"{name} is not supported; use {_RENAMED[name]}", param=name)
            log_once(log, logging.DEBUG, f"unknown request field ignored: {name[:64]}")


class InputRequest(PoolingBody):
    """Body of POST /v1/embeddings, /pooling and /classify: `input` in its four forms, or one conversation.

    Numbers are written as JSON numbers, base64 of their bytes, or the bytes themselves. task is for /pooling.
    """

    input: object = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Options | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    endianness: Literal["native", "little", "big"] = "little"
    dimensions: Int | None = None
    task: PoolingTask | None = None

    def check(self) -> None:
        super().check()
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("send either input or messages", param="input")

    def check_task(self, task: PoolingTask) -> None:
        """Refuse a task other than the path's own."""
        if self.task not in (None, task):
            raise InvalidRequest(f"task {self.task} is not this path's, which is {task}; use /pooling", param="task")


class ScoreRequest(PoolingBody):
    """Body of POST /score: two texts or lists of them, under one of three pairs of names.

    The sides are taken apart in pooling_job.py: their forms need exact messages.
    """

    text_1: object = None
    text_2: object = None
    queries: object = None
    documents: object = None
    data_1: object = None
    data_2: object = None

    def sides(self) -> tuple[tuple[str, object], tuple[str, object]]:
        """Give the two sides with their names. Raises InvalidRequest unless exactly one pair is complete."""
        named = (
            (("text_1", self.text_1), ("text_2", self.text_2)),
            (("queries", self.queries), ("documents", self.documents)),
            (("data_1", self.data_1), ("data_2", self.data_2)),
        )
        sent = [pair for pair in named if pair[0][1] is not None or pair[1][1] is not None]
        if len(sent) != 1:
            raise InvalidRequest("send text_1 and text_2, queries and documents, or data_1 and data_2")
        for name, value in sent[0]:
            if value is None:
                raise InvalidRequest(f"{name} is missing", param=name)
        return sent[0]


class RerankRequest(PoolingBody):
    """Body of POST /rerank: documents to be ordered by how well they answer the query; top_n 0 means all of them."""

    query: str
    documents: Annotated[list[object], BeforeValidator(AtMost(_MAX_TEXTS))]
    top_n: Int = 0

    def check(self) -> None:
        super().check()
        if self.top_n < 0:
            raise InvalidRequest(f"top_n must be 0 (all) or more, got {self.top_n}", param="top_n")
