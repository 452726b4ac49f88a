"""Messages between API server and engine core.

Structs are encoded as arrays: field order is the protocol. New fields go last and have defaults; both ends come
from the same version, which the handshake checks.
"""

from __future__ import annotations

import enum
import time
from typing import Final, Literal

import msgspec
import numpy as np

from serve.checkpoint import Checkpoint
from serve.config import EngineConfig
from serve.pooling_params import PoolingParams
from serve.sampling_params import SamplingParams

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"


class RequestType(enum.Enum):
    """First frame of every message to the engine core; the value is the byte on the wire."""

    ADD = b"\x00"
    ABORT = b"\x01"
    CONTROL = b"\x03"


class FinishReason(enum.IntEnum):
    """Why a request ended, as sent; str() of the lower-case name is the API word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of the wire structs: arrays of every field on the wire, no garbage-collector tracking."""


class EngineCoreRequest(Message):
    """One engine request (n == 1): phase 3 sends it, phase 4 decodes it.

    request_id is the internal id (client id plus random suffix). arrival_time is wall-clock seconds. With
    pooling_params the request wants a pooled result instead of tokens. prompt_embeds [num_prompt_tokens, hidden_size]
    float32 stands in the place of the embeddings of prompt_token_ids, which are then all 0.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    cache_salt: str | None = None
    client_index: int = 0
    priority: int = 0
    external_req_id: str | None = None
    pooling_params: PoolingParams | None = None
    prompt_embeds: np.ndarray | None = None


class EventType(enum.IntEnum):
    """Kinds of scheduler events of a request."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(Message):
    """A scheduler event; timestamp is time.monotonic() of the engine process, only differences mean something."""

    type: EventType
    timestamp: float


class LogprobsLists(Message):
    """Logprobs of a run of tokens. Column 0 is the sampled (or actual prompt) token, then the top k, best first.

    With logprob_token_ids those ids stand in the place of the top k, best first too.

    token_ids     [n, k + 1] int32
    logprobs      [n, k + 1] float32
    sampled_ranks [n] int32, 1 = best; the number of entries with a value >= the token's own
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_ranks: np.ndarray


class PrefillStats(Message):
    """Where the prompt tokens of a request came from; sent with its first output."""

    num_prompt_tokens: int
    num_cached_tokens: int


class EngineCoreOutput(Message):
    """What one step produced for one request; finished iff finish_reason is set.

    stop_reason is the stop token id when a secondary stop id ended it. error is the cause word plus text for
    finish_reason ERROR. new_prompt_logprobs holds prompt_len - 1 rows (position 0 has none), sent once. pooling_output
    is the result of a request with pooling_params: float32, [size] or [num_tokens, size].
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    events: list[EngineCoreEvent] | None = None
    prefill_stats: PrefillStats | None = None
    error: str | None = None
    pooling_output: np.ndarray | None = None


class SchedulerStats(Message):
    """Counters of the engine core; rides on one message a step.

    num_* are gauges of now; prefix_cache_* (tokens) and num_preemptions are increments since the last message.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_deferred_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0


class ControlResult(Message):
    """Answer to a control call: result, or failure_message when the call raised."""

    call_id: int
    result: bool | None = None
    failure_message: str | None = None


class EngineCoreOutputs(Message):
    """One outbound message: all outputs of one step for one API server.

    timestamp is time.monotonic() of the engine process.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = msgspec.field(default_factory=time.monotonic)
    control_result: ControlResult | None = None


class PauseScheduler(Message, tag="pause"):
    """Stop admitting work. abort: finish all as aborted; wait: let running ones finish; keep: freeze everything."""

    mode: Literal["abort", "wait", "keep"]
    clear_cache: bool = True


class ResumeScheduler(Message, tag="resume"):
    """Undo a pause; frozen requests continue."""


class IsPaused(Message, tag="is_paused"):
    """Ask whether the scheduler is paused."""


class ResetPrefixCache(Message, tag="reset_prefix_cache"):
    """Drop all cached prefixes; result False when blocks are in use and running requests may not be preempted."""

    reset_running_requests: bool = False


class CheckIntegrity(Message, tag="check_integrity"):
    """Check the block pool's invariants; result True, or a failure message with the broken numbers."""


class SetVocabulary(Message, tag="set_vocabulary"):
    """Tell the engine core the bytes of every token; sent once, before the first request that needs them.

    Grammars work on text, and the core has no tokenizer. special_token_ids never match text; eos_token_ids end an
    answer.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]


Control = PauseScheduler | ResumeScheduler | IsPaused | ResetPrefixCache | CheckIntegrity | SetVocabulary


class ControlCall(Message):
    """A control call and where its answer goes."""

    client_index: int
    call_id: int
    control: Control


class Hello(msgspec.Struct, tag="hello"):
    """Engine core to launcher, first handshake message."""

    version: str
    pid: int


class EngineInit(msgspec.Struct, tag="init"):
    """Launcher to engine core: everything it needs to start. Addresses are ZeroMQ endpoints, one per API server."""

    config: EngineConfig
    checkpoint: Checkpoint
    input_addresses: list[str]
    output_addresses: list[str]


class StartFailed(msgspec.Struct, tag="start_failed"):
    """Engine core to launcher: start-up failed; message is for people, exit_code an errors.ExitCode."""

    message: str
    exit_code: int


class LoadProgress(msgspec.Struct, tag="progress"):
    """Engine core to launcher while loading: what it is doing now."""

    stage: str


class Ready(msgspec.Struct, tag="ready"):
    """Engine core to launcher: serving. Also the first message on every input socket.

    max_model_len is the resolved limit in tokens; kv_cache_size_tokens = usable blocks * block_size, 0 without a cache;
    kv_cache_max_concurrency = how many requests of max_model_len fit; kv_cache_size_bytes: what the cache grows to.
    """

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    device: str
    kv_cache_size_tokens: int
    kv_cache_max_concurrency: float
    load_seconds: float
    description: str = ""
    kv_cache_size_bytes: int = 0


HandshakeFromEngine = Hello | StartFailed | LoadProgress | Ready
