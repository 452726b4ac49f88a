"""Persistent arrays of the requests the worker holds, one row (req_index) each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serve.wire.step import NewRequestData
from serve.worker.sample.logprobs import PromptLogprobs
from serve.worker.sample.row import RowSampling, prepare_row, resolve_num_logprobs


class RequestStates:
    """Who sits in which row, with its tokens and sampling settings.

    token_ids            [max_num_reqs, max_model_len + 1] int32; the system hands out its pages on first write
    flat_token_ids       the same memory, row after row
    num_tokens           [max_num_reqs] int64, prompt and output ids known
    num_prompt_tokens    [max_num_reqs] int64
    num_computed_tokens  [max_num_reqs] int64
    version changes whenever a row is taken or freed.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # One column more than the limit: a request that just reached it may run once more before it is dropped.
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)
        self.flat_token_ids = self.token_ids.reshape(-1)
        self.num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.req_id_to_index: dict[str, int] = {}
        self.rows: list[RowSampling | None] = [None] * max_num_reqs
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        self.prompt_embeds: dict[str, NDArray[np.float32]] = {}
        self.version = 0
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def add(self, new: NewRequestData) -> int:
        """Take a row for a new or resumed request and give its index."""
        num_tokens = len(new.token_ids)
        assert new.req_id not in self.req_id_to_index, f"request {new.req_id} is already held"
        assert self._free_rows, f"more than {len(self.rows)} requests at once"
        assert 0 < num_tokens < self.token_ids.shape[1], f"{num_tokens} tokens do not fit a row"
        assert new.num_computed_tokens < num_tokens, "a scheduled request has a token to compute"
        index = self._free_rows.pop()
        self.req_id_to_index[new.req_id] = index
        self.token_ids[index, :num_tokens] = new.token_ids
        self.num_tokens[index] = num_tokens
        self.num_prompt_tokens[index] = new.num_prompt_tokens
        self.num_computed_tokens[index] = new.num_computed_tokens
        self.rows[index] = prepare_row(
            new.sampling_params,
            self.token_ids[index],
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=num_tokens,
            vocab_size=self._vocab_size,
            has_prompt_ids=new.prompt_embeds is None,
        )
        self._start_prompt_logprobs(new)
        if new.prompt_embeds is not None:
            self.prompt_embeds[new.req_id] = new.prompt_embeds
        self.version += 1
        return index

    def remove(self, req_id: str) -> None:
        """Free the row of a finished or preempted request; one that is not held is ignored.

        A request that was aborted before its first step was never sent here.
        """
        index = self.req_id_to_index.pop(req_id, None)
        if index is None:
            return
        self.rows[index] = None
        self.prompt_logprobs.pop(req_id, None)
        self.prompt_embeds.pop(req_id, None)
        self._free_rows.append(index)
        self.version += 1

    def append_tokens(self, req_indices: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        """Append one sampled token to each row; a full row stays as it is."""
        ends = self.num_tokens[req_indices]
        fits = ends < self.token_ids.shape[1]
        if not fits.all():
            req_indices, token_ids, ends = req_indices[fits], token_ids[fits], ends[fits]
        self.token_ids[req_indices, ends] = token_ids
        self.num_tokens[req_indices] = ends + 1

    def sampling_rows(self, req_indices: list[int]) -> list[RowSampling]:
        """Give the sampling settings of held rows."""
        rows = [self.rows[index] for index in req_indices]
        held = [row for row in rows if row is not None]
        assert len(held) == len(rows), "a scheduled request has no row"
        return held

    def _start_prompt_logprobs(self, new: NewRequestData) -> None:
        """Reserve the table of a request that wants prompt logprobs and has not had them.

        A resumed request that already generated tokens got its table when its prefill first finished.
        """
        num_logprobs = resolve_num_logprobs(new.sampling_params.prompt_logprobs, self._vocab_size)
        if num_logprobs is None or len(new.token_ids) > new.num_prompt_tokens:
            return
        assert new.num_computed_tokens == 0, "prompt logprobs need the whole prompt computed, not read from the cache"
        self.prompt_logprobs[new.req_id] = PromptLogprobs(new.num_prompt_tokens, num_logprobs)
