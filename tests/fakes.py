"""Stand-ins for the slow or large parts: a tokenizer of bytes and an engine core that does what a test says."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from serve.checkpoint import Checkpoint, ModelArch, PoolerConfig
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from serve.engine.stats import EngineStats
from serve.pooling_params import PoolingParams
from serve.renderers.decode_stream import Utf8Stream
from serve.sampling_params import SamplingParams, normalize
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder
from serve.wire.frontend import (
    ENGINE_CORE_DEAD,
    ControlCall,
    ControlResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Ready,
    RequestType,
    SchedulerStats,
)
from serve.wire.sockets import connect_dealer, connect_push, new_context, poll
from tests.waiting import async_wait_until

NUM_BYTES = 256
EOS_ID = 256
BOS_ID = 257
SECOND_EOS_ID = 258
BYTE_VOCAB_SIZE = 260


class ByteDecodeStream:
    """Text of bytes, whole characters only."""

    def __init__(self, tokenizer: ByteTokenizer, skip_special_tokens: bool, visible_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_ids = tokenizer.all_special_ids - visible_token_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = Utf8Stream()

    def step(self, token_id: int) -> str | None:
        if token_id in self._skip_ids:
            return None
        return self._utf8.decode(self._tokenizer.token_to_bytes(token_id)) or None


class ByteTokenizer:
    """One id a byte, then <eos>, <bos>, <eot> and an unused id. words adds ids for longer byte strings."""

    def __init__(self, words: Sequence[bytes] = ()) -> None:
        special = {EOS_ID: b"<eos>", BOS_ID: b"<bos>", SECOND_EOS_ID: b"<eot>"}
        self._bytes = {i: bytes([i]) for i in range(NUM_BYTES)} | special
        self._bytes |= {BYTE_VOCAB_SIZE + i: word for i, word in enumerate(words)}
        self.vocab_size = BYTE_VOCAB_SIZE + len(words)
        self.max_token_id = self.vocab_size - 1
        self.eos_token_id: int | None = EOS_ID
        self.bos_token_id: int | None = BOS_ID
        self.max_chars_per_token = max(map(len, self._bytes.values()))
        self.all_special_ids = frozenset(special)
        self.chat_template: str | dict[str, str] | None = None
        self.special_tokens = {"eos_token": "<eos>", "bos_token": "<bos>"}
        self.truncation_side: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        token_ids = ([BOS_ID] if add_special_tokens else []) + list(text.encode())
        return token_ids[:max_length]

    def encode_texts(
        self, texts: tuple[str, ...], *, add_special_tokens: bool, keep: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        """Put <bos> before and <eos> after each text; of texts that are too long the last loses first."""
        parts = [list(text.encode()) for text in texts]
        while keep is not None and sum(map(len, parts)) > keep:
            longest = parts[-1] if parts[-1] else parts[0]
            del longest[0 if side == "left" else -1]
        ids, kinds = [], []
        for kind, part in enumerate(parts):
            whole = [BOS_ID, *part, EOS_ID] if add_special_tokens else part
            ids += whole
            kinds += [kind] * len(whole)
        return ids, kinds

    def num_added_tokens(self, *, is_pair: bool) -> int:
        return 4 if is_pair else 2

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        shown = [i for i in token_ids if not (skip_special_tokens and i in self.all_special_ids)]
        return b"".join(map(self.token_to_bytes, shown)).decode("utf-8", errors="replace")

    def token_to_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def id_to_token(self, token_id: int) -> str:
        return self.token_to_bytes(token_id).decode("latin-1")

    def token_to_id(self, token: str) -> int | None:
        return next((i for i, data in self._bytes.items() if data == token.encode()), None)

    def new_decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, visible_token_ids: Sequence[int] = ()
    ) -> ByteDecodeStream:
        return ByteDecodeStream(self, skip_special_tokens, frozenset(visible_token_ids))


def byte_checkpoint(vocab_size: int = BYTE_VOCAB_SIZE) -> Checkpoint:
    """Describe a tiny model with the ByteTokenizer's vocabulary."""
    arch = ModelArch(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_theta=10000.0,
    )
    return Checkpoint("tiny", "/nowhere", "safetensors", (), arch, eos_token_ids=(EOS_ID, SECOND_EOS_ID))


def ready_message(max_model_len: int = 128) -> Ready:
    """Give what an engine core reports when it is loaded."""
    return Ready(
        max_model_len=max_model_len,
        num_gpu_blocks=65,
        block_size=16,
        dtype="float32",
        device="cpu",
        kv_cache_size_tokens=1024,
        kv_cache_max_concurrency=1024 / max_model_len,
        load_seconds=0.1,
    )


class FakeCore:
    """An engine core over real sockets that keeps what it receives and sends what the test tells it to."""

    def __init__(self, input_address: str, output_address: str, ready: Ready | None = None) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.aborts: list[list[str]] = []
        self.control_answers: queue.Queue[ControlResult] = queue.Queue()
        self.controls: list[ControlCall] = []
        self.is_paused = threading.Event()  # while set, the fake reads nothing
        self._stopped = threading.Event()
        self._context = new_context()
        self._input = connect_dealer(self._context, input_address, engine_index=0)
        self._output = connect_push(self._context, output_address)
        self._encoder = MsgpackEncoder()
        self._input.send_multipart(MsgpackEncoder().encode(ready or ready_message()))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        add = MsgpackDecoder(EngineCoreRequest)
        abort = MsgpackDecoder(list[str])
        control = MsgpackDecoder(ControlCall)
        while not self._stopped.is_set():
            if self.is_paused.is_set() or not poll([self._input], 0.02):
                self._stopped.wait(0.005)
                continue
            kind, *frames = self._input.recv_multipart()
            match RequestType(kind):
                case RequestType.ADD:
                    self.requests.append(add.decode(frames))
                case RequestType.ABORT:
                    self.aborts.append(abort.decode(frames))
                case RequestType.CONTROL:
                    self.controls.append(control.decode(frames))

    async def wait_requests(self, count: int) -> list[EngineCoreRequest]:
        """Wait until that many requests have arrived in all."""
        await async_wait_until(lambda: len(self.requests) >= count, 5, f"{count} requests at the core")
        return self.requests

    def send(self, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None) -> None:
        """Send one step's outputs."""
        self.send_message(EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats))

    def send_message(self, message: EngineCoreOutputs) -> None:
        """Send a message as it is."""
        self._output.send_multipart(self._encoder.encode(message))

    def send_text(self, request_id: str, text: str, reason: FinishReason | None = None) -> None:
        """Send one byte token after the other, the last with the reason."""
        data = text.encode()
        for position, byte in enumerate(data):
            is_last = position == len(data) - 1
            self.send(EngineCoreOutput(request_id, [byte], finish_reason=reason if is_last else None))

    def send_frames(self, *frames: bytes) -> None:
        """Send raw frames."""
        self._output.send_multipart(frames)

    def die(self) -> None:
        """Say the word of a dying engine core."""
        self.send_frames(ENGINE_CORE_DEAD)

    def close(self) -> None:
        """Stop reading and close the sockets; what was sent still arrives."""
        self._stopped.set()
        self._thread.join(5)
        self._input.close()
        self._output.close()
        self._context.term()


class ScriptedStream:
    """The hand-overs of one request as a test wrote them; an Event in between is waited for, an error is raised."""

    def __init__(
        self,
        llm: ScriptedLLM,
        request_id: str,
        steps: Sequence[RequestOutput | Exception | asyncio.Event],
        on_read: Callable[[str], None] = lambda request_id: None,
    ):
        self._llm = llm
        self._on_read = on_read
        self._request_id = request_id
        self._steps = list(steps)

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                self._on_read(self._request_id)
                return step
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._llm.closed.append(self._request_id)


class ScriptedLLM:
    """An engine client without an engine: requests are kept, answers come from a script."""

    def __init__(
        self,
        script: Callable[[SamplingParams], Sequence[RequestOutput | Exception | asyncio.Event]],
        *,
        max_model_len: int = 128,
    ) -> None:
        self.max_model_len = max_model_len
        self.pooling: PoolerConfig | None = None
        self.end_token_ids = frozenset({EOS_ID, SECOND_EOS_ID})
        self.prompt_embeds_size: int | None = None
        self.default_sampling: dict[str, float] = {}
        self.stats = EngineStats(max_model_len)
        self.requests: list[tuple[list[int], SamplingParams, str, RequestOptions]] = []
        self.closed: list[str] = []
        self.is_errored = False
        self.is_full = False
        self.silence = 0.0
        self.pauses: list[str] = []
        self._script = script
        self.pooling_requests: list[tuple[list[int], PoolingParams, str, RequestOptions]] = []
        self.pooling_results: list[str] = []
        self.most_open = 0

    async def add_pooling_request(
        self, prompt_token_ids: list[int], params: PoolingParams, request_id: str, *, options: RequestOptions
    ) -> ScriptedStream:
        """Give a vector of two elements: the number of tokens, and the last of them."""
        self.pooling_requests.append((prompt_token_ids, params, request_id, options))
        self.most_open = max(self.most_open, len(self.pooling_requests) - len(self.pooling_results))
        vector = np.array([len(prompt_token_ids), prompt_token_ids[-1]], dtype=np.float32)
        if params.use_activation:
            vector /= np.linalg.norm(vector)
        choice = CompletionOutput(0, "", [], finish_reason=FinishReason.STOP)
        output = RequestOutput(request_id, prompt_token_ids, [choice], finished=True, pooled=vector)
        return ScriptedStream(self, request_id, [output], on_read=self.pooling_results.append)

    def heartbeat_age(self) -> float:
        return self.silence

    async def add_request(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, request_id: str, *, options: RequestOptions
    ) -> ScriptedStream:
        params = normalize(sampling_params)
        self.requests.append((prompt_token_ids, params, request_id, options))
        return ScriptedStream(self, request_id, self._script(params))

    async def pause(self, mode: str, *, clear_cache: bool = True) -> None:
        self.pauses.append(mode)

    async def resume(self) -> None:
        self.pauses.append("resume")

    async def is_paused(self) -> bool:
        return bool(self.pauses) and self.pauses[-1] != "resume"

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        return reset_running_requests


def hand_over(
    text: str,
    token_ids: Sequence[int] = (),
    *,
    index: int = 0,
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
    logprobs: list[PositionLogprobs] | None = None,
) -> RequestOutput:
    """Give a hand-over of one choice; without ids each byte of the text is one token."""
    ids = list(token_ids) or list(text.encode())
    output = CompletionOutput(index, text, ids, logprobs, finish, stop_reason)
    return RequestOutput("id", [], [output], finished=finish is not None)
