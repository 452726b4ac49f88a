"""From hidden states to one result a request: which rows count, the classifier's head, and the last activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.checkpoint import ModelArch, PoolerConfig
from serve.models.layers.linear import LinearLayer, load_linear
from serve.models.weights.loader import ParameterLoader
from serve.pooling_params import PoolingParams

Head = Callable[[Tensor], Tensor]


class PartialPool:
    """What is known of a request's pooled rows while its prompt is computed, chunk by chunk."""

    def __init__(self, config: PoolerConfig, params: PoolingParams) -> None:
        self._kind = "all" if params.task.startswith("token_") else config.pooling_type
        self._rows: list[Tensor] = []
        self._sum: Tensor | None = None
        self._num_tokens = 0

    def update(self, rows: Tensor) -> None:
        """Take the hidden states [n, hidden_size] of the prompt's next n tokens."""
        self._num_tokens += len(rows)
        match self._kind:
            case "all":
                self._rows.append(rows)
            case "cls":
                self._rows = self._rows or [rows[:1]]
            case "last":
                self._rows = [rows[-1:]]
            case "mean":
                total = rows.float().sum(dim=0, keepdim=True)
                self._sum = total if self._sum is None else self._sum + total

    def result(self) -> Tensor:
        """Give the pooled rows in float32: [1, hidden_size], or [num_tokens, hidden_size] for the token tasks."""
        if self._sum is not None:
            return self._sum / self._num_tokens
        return torch.cat(self._rows).float()


class Pooler:
    """The layers after the backbone. head maps pooled rows to class scores, None for an embedding model."""

    def __init__(self, config: PoolerConfig, head: Head | None) -> None:
        self.config = config
        self._head = head

    def start(self, params: PoolingParams) -> PartialPool:
        """Begin to pool a request."""
        return PartialPool(self.config, params)

    def finish(self, pool: PartialPool, params: PoolingParams) -> Tensor:
        """Give a request's result: [size], or [num_tokens, size] for the token tasks, float32."""
        rows = pool.result()
        is_active = self.config.uses_activation if params.use_activation is None else params.use_activation
        if self._head is not None:
            rows = self._activate(self._head(rows).float()) if is_active else self._head(rows).float()
        else:
            rows = rows if params.dimensions is None else rows[:, : params.dimensions]
            rows = F.normalize(rows, dim=-1) if is_active else rows
        return rows if params.task.startswith("token_") else rows[0]

    def _activate(self, scores: Tensor) -> Tensor:
        match self.config.activation:
            case "softmax":
                return torch.softmax(scores, dim=-1)
            case "sigmoid":
                return torch.sigmoid(scores)
            case "identity":
                return scores


@dataclass(frozen=True, slots=True)
class ClassHead:
    """Class scores of pooled rows: through a dense layer with tanh first when there is one."""

    dense: LinearLayer | None
    out: LinearLayer
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """Map [n, hidden_size] to [n, num_labels]."""
        rows = rows.to(self.dtype)
        return self.out(rows if self.dense is None else torch.tanh(self.dense(rows)))


def head_shapes(arch: ModelArch, config: PoolerConfig) -> dict[str, tuple[int, ...]]:
    """List the parameters of the classifier's head by checkpoint name; none for an embedding model."""
    if config.task != "classify":
        return {}
    hidden, num_labels = arch.hidden_size, len(config.labels)
    if config.head == "linear":
        return {"score.weight": (num_labels, hidden)}
    dense, out = _head_names(config)
    return {
        f"{dense}.weight": (hidden, hidden),
        f"{dense}.bias": (hidden,),
        f"{out}.weight": (num_labels, hidden),
        f"{out}.bias": (num_labels,),
    }


def _head_names(config: PoolerConfig) -> tuple[str, str]:
    return ("pooler.dense", "classifier") if config.head == "bert" else ("classifier.dense", "classifier.out_proj")


def build_pooler(config: PoolerConfig, loader: ParameterLoader, dtype: torch.dtype) -> Pooler:
    """Assemble the pooler from loaded parameters."""
    if config.task != "classify":
        return Pooler(config, None)
    if config.head == "linear":
        return Pooler(config, ClassHead(None, load_linear(loader, "score"), dtype))
    dense, out = _head_names(config)
    return Pooler(config, ClassHead(load_linear(loader, dense, bias=True), load_linear(loader, out, bias=True), dtype))
