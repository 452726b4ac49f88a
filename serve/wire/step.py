"""Messages between the scheduler and the worker: one object goes down a step, one comes up."""

from __future__ import annotations

import numpy as np

from serve.pooling_params import PoolingParams
from serve.sampling_params import SamplingParams
from serve.wire.frontend import LogprobsLists, Message


class KVCacheSpec(Message):
    """What one layer of the model stores for one block.

    page_size_bytes is the size of one block in one layer. sliding_window is in tokens and set only when every layer
    uses it; a model that mixes layer kinds is treated as full attention.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_size_bytes: int
    sliding_window: int | None = None


class KVCacheConfig(Message):
    """The sized cache: num_blocks includes the null block 0."""

    num_blocks: int
    block_size: int


class StepCost(Message):
    """What a step costs, in seconds, as measured at start: base, and for each of its tokens the rest.

    per_key is multiplied by the number of keys that the token's query looks at.
    """

    base: float
    per_token: float
    per_key: float

    def token_seconds(self, position: int) -> float:
        """Give the cost of a token at a position of its request."""
        return self.per_token + self.per_key * position


class NewRequestData(Message):
    """A request the worker does not know: first scheduled, or resumed after preemption.

    token_ids are all known ids (prompt, then output of a resumed request); num_prompt_tokens marks the border.
    """

    req_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    pooling_params: PoolingParams | None = None
    prompt_embeds: np.ndarray | None = None


class CachedRequestData(Message):
    """Deltas, column-wise, for requests the worker already holds. new_block_ids are appended to the block table.

    Blocks that fell out of a sliding window stay in the worker's table: attention never reads them.
    """

    req_ids: list[str] = []
    new_block_ids: list[list[int]] = []
    num_computed_tokens: list[int] = []


class SchedulerOutput(Message):
    """The plan of one step.

    num_scheduled_tokens[req_id] > 0 for each request of the step, in schedule order. finished_req_ids and
    preempted_req_ids were finished or preempted since the last step: the worker drops their state first.
    structured_req_ids may need a mask of allowed tokens; with has_pending_structured_tokens the mask of one of them
    depends on a token that a step in flight samples.
    """

    step_index: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: list[str] = []
    preempted_req_ids: list[str] = []
    structured_req_ids: list[str] = []
    has_pending_structured_tokens: bool = False


class GrammarOutput(Message):
    """Allowed-token masks for the structured requests of a step.

    bitmask [len(req_ids), ceil(vocab_size / 32)] int32, bit set = allowed.
    """

    req_ids: list[str]
    bitmask: np.ndarray


class ModelRunnerOutput(Message):
    """What one step produced, in the order of req_ids.

    sampled_token_ids[i] is empty for a request whose prefill did not finish in this step. logprobs holds one table
    per request that asked for them, one row per sampled token. prompt_logprobs holds complete tables of requests
    whose prefill finished in this step. errors maps a failed request to its cause text, for example
    "nan_logits: ...". pooler_outputs holds the result of each request with pooling_params whose prompt is complete:
    such a request samples no token.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, LogprobsLists] = {}
    prompt_logprobs: dict[str, LogprobsLists] = {}
    errors: dict[str, str] = {}
    pooler_outputs: dict[str, np.ndarray] = {}
