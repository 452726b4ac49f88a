"""The plug-in seam of sampling: extra logits processors, how they are found and what they are told.

A processor is a class that fits LogitsProcessor, named by `--logits-processors module:Class` or by an entry point of
the group serve.logits_processors. It sees every row that samples in a step as one tensor, and a BatchUpdate whenever
the rows are not those of the step before.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Final, Protocol, cast

from torch import Tensor

from serve.errors import ConfigError, InvalidRequest
from serve.sampling_params import SamplingParams

ENTRY_POINT_GROUP: Final = "serve.logits_processors"
_METHODS: Final = ("validate_params", "is_argmax_invariant", "update_state", "apply")


@dataclass(slots=True)
class AddedRow:
    """A request that takes a row. output_token_ids is its live list: it grows as the request generates."""

    row: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(slots=True)
class BatchUpdate:
    """How the rows differ from the step before; apply removed, then added, then moved, each in order.

    moved holds (from, to) pairs, one way: the row at `from` is empty afterwards. An added row may replace a removed
    one. batch_size is the number of rows afterwards.
    """

    batch_size: int
    removed: list[int] = field(default_factory=list)
    added: list[AddedRow] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)


class LogitsProcessor(Protocol):
    """One extra transform of the logits. Constructed without arguments, once, in the engine process."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, with a message for the client, when a request's values make no sense."""

    def is_argmax_invariant(self) -> bool:
        """Tell whether apply never changes which token is the largest; such a processor runs after temperature."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows; None when they are those of the step before. Called once before each apply."""

    def apply(self, logits: Tensor) -> Tensor:
        """Give the new logits [num_rows, vocab_size] float32; changing them in place is allowed."""


@dataclass(slots=True)
class ProcessorRequest:
    """What processors may know of one running request."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class ProcessorChain:
    """All loaded processors and the row order they see; with none loaded every call is a no-op."""

    def __init__(self, processors: list[LogitsProcessor]) -> None:
        self._all = processors
        self._before_argmax = [p for p in processors if not p.is_argmax_invariant()]
        self._after_temperature = [p for p in processors if p.is_argmax_invariant()]
        self.changes_argmax = bool(self._before_argmax)
        self.keeps_argmax = bool(self._after_temperature)
        self.is_empty = not processors
        self._requests: dict[str, ProcessorRequest] = {}
        self._rows: list[str] = []

    def admit(self, req_id: str, request: ProcessorRequest) -> str | None:
        """Note a new request; give the reason when a processor refuses its parameters."""
        self._requests[req_id] = request
        for processor in self._all:
            try:
                processor.validate_params(request.params)
            except (ValueError, InvalidRequest) as e:
                return f"invalid_request: {e}"
        return None

    def append(self, req_id: str, token_id: int) -> None:
        """Note a sampled token."""
        self._requests[req_id].output_token_ids.append(token_id)

    def forget(self, req_id: str) -> None:
        """Drop a finished or preempted request; its row is reported as removed in the next step."""
        self._requests.pop(req_id, None)
        if req_id in self._rows:
            self._rows[self._rows.index(req_id)] = ""

    def arrange(self, req_ids: list[str]) -> list[str]:
        """Give the row order of the next logits, a permutation of req_ids, and tell the processors what changed."""
        update = self._follow(req_ids)
        for processor in self._all:
            processor.update_state(update)
        return list(self._rows)

    def apply_before_argmax(self, logits: Tensor) -> None:
        """Run the processors that may change the argmax, in place."""
        _run(self._before_argmax, logits)

    def apply_after_temperature(self, logits: Tensor) -> None:
        """Run the argmax-invariant processors on temperature-scaled logits, in place."""
        _run(self._after_temperature, logits)

    def _follow(self, req_ids: list[str]) -> BatchUpdate | None:
        """Turn the row list into one that holds exactly req_ids, densely, with as few moves as possible."""
        rows = self._rows
        wanted = set(req_ids)
        holes = [row for row, req_id in enumerate(rows) if req_id not in wanted]
        present = set(rows)
        new = [req_id for req_id in req_ids if req_id not in present]
        if not holes and not new:
            return None
        update = BatchUpdate(batch_size=len(req_ids), removed=list(holes))
        for req_id in new:
            if holes:
                row = holes.pop(0)
                rows[row] = req_id
            else:
                row = len(rows)
                rows.append(req_id)
            request = self._requests[req_id]
            update.added.append(AddedRow(row, request.params, request.prompt_token_ids, request.output_token_ids))
        while holes:
            last = len(rows) - 1
            if last == holes[-1]:
                holes.pop()
            else:
                row = holes.pop(0)
                update.moved.append((last, row))
                rows[row] = rows[last]
            rows.pop()
        return update


def load_processors(paths: tuple[str, ...]) -> list[LogitsProcessor]:
    """Load the processors of the entry point group, then those of the given module:Class paths.

    Raises ConfigError naming the path when one does not exist, cannot be imported or does not fit the protocol.
    """
    found = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)]
    return [_load(path) for path in (*found, *paths)]


def _load(path: str) -> LogitsProcessor:
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"--logits-processors {path!r} is not an import path; write it as module:Class")
    try:
        members = vars(importlib.import_module(module_name))
    except ImportError as e:
        raise ConfigError(f"--logits-processors {path!r}: module {module_name!r} cannot be imported: {e}") from e
    processor_class = members.get(class_name)
    if not inspect.isclass(processor_class):
        raise ConfigError(f"--logits-processors {path!r}: module {module_name!r} has no class {class_name!r}")
    missing = [name for name in _METHODS if name not in dir(processor_class)]
    if missing:
        raise ConfigError(f"--logits-processors {path!r}: the class lacks {', '.join(missing)}")
    return cast(LogitsProcessor, processor_class())


def _run(processors: list[LogitsProcessor], logits: Tensor) -> None:
    for processor in processors:
        result = processor.apply(logits)
        if result is not logits:
            logits.copy_(result)
