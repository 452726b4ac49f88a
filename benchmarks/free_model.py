"""A model that costs nothing, and an engine-core process around it: what benchmarks of the path use."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from serve import __version__
from serve.core.executor.uniproc import UniprocExecutor
from serve.core.proc import EngineCoreProc
from serve.kernels.attention import AttentionMetadata, KVCache
from serve.models.layers.embedding import PromptEmbeds
from serve.wire import sockets
from serve.wire.frontend import EngineInit, Hello
from serve.worker.worker import Worker

MAX_STEP_TOKENS = 8192


class FreeModel:
    """A model without layers: each step all requests get the next token of a text.

    seconds is how long each forward pass sleeps.
    """

    def __init__(self, vocab_size: int, text: Sequence[int] = (1, 2, 3), *, seconds: float = 0.0) -> None:
        self.num_kv_heads, self.head_size, self.num_layers = 1, 16, 1
        self._text = text
        self._seconds = seconds
        self._step = 0
        self._hidden = torch.zeros((MAX_STEP_TOKENS, 1))
        self._logits = torch.zeros((128, vocab_size))
        self._table = self._logits.numpy()
        # Slicing a tensor is slow beside what is measured.
        self._slices: dict[tuple[int, int], Tensor] = {}

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._first(self._hidden, meta.num_tokens if rows is None else len(rows))

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        text = self._text
        self._table[:, text[self._step % len(text)]] = 0.0
        self._step += 1
        self._table[:, text[self._step % len(text)]] = 1.0
        return self._first(self._logits, len(hidden_states))

    def _first(self, rows: Tensor, count: int) -> Tensor:
        key = (id(rows), count)
        if key not in self._slices:
            self._slices[key] = rows[:count]
        return self._slices[key]


def new_engine(init: EngineInit, model: Callable[[], FreeModel]) -> EngineCoreProc:
    """Give an engine core with all its parts but the model."""
    executor = UniprocExecutor(
        lambda config, checkpoint: Worker(config, checkpoint, load=lambda *_: model()), init.config, init.checkpoint
    )
    return EngineCoreProc(init, executor)


def serve_engine(endpoint: str, text: Sequence[int], *, seconds: float) -> None:
    """Shake hands with an API server as a real engine core does, and run until told to stop."""
    context = sockets.new_context()
    link = sockets.connect_dealer(context, endpoint, engine_index=0, linger_ms=sockets.HANDSHAKE_LINGER_MS)
    link.send(msgspec.msgpack.encode(Hello(__version__, os.getpid())))
    init = msgspec.msgpack.decode(link.recv(), type=EngineInit)
    proc = new_engine(init, lambda: FreeModel(init.checkpoint.arch.vocab_size, text, seconds=seconds))
    link.send(msgspec.msgpack.encode(proc.ready))
    proc.run()
    link.close()
    context.term()


def print_thread_ids(names: Sequence[str]) -> None:
    """Write the ids of the named threads to stdout, as JSON, once all of them run."""

    def report() -> None:
        while len(ids := {t.name: t.native_id for t in threading.enumerate() if t.name in names}) < len(names):
            time.sleep(0.01)
        print(json.dumps(ids), flush=True)

    threading.Thread(target=report, daemon=True).start()


def cpu_seconds(pid: int, thread_id: int | None = None) -> float:
    """Give the CPU time that a thread has used, or all threads of a process together."""
    tasks = Path(f"/proc/{pid}/task")
    ids = [thread_id] if thread_id is not None else [int(path.name) for path in tasks.iterdir()]
    return sum(int((tasks / str(i) / "schedstat").read_text().split()[0]) for i in ids) / 1e9
