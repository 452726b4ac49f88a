"""From a checkpoint's tensors to parameters: checks names and shapes, converts, fuses, in parallel."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

import torch
from torch import Tensor

from serve.checkpoint import Checkpoint
from serve.errors import ConfigError, ExitCode
from serve.kernels import ops
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight, joinable, side_by_side
from serve.models.weights.dummy import DummySource
from serve.models.weights.gguf import GGUFSource
from serve.models.weights.names import is_ignored
from serve.models.weights.packed_cache import CacheEntry
from serve.models.weights.quantized_safetensors import QuantizedSafetensorsSource
from serve.models.weights.safetensors import SafetensorsSource

log = logging.getLogger(__name__)

_MAX_NAMED: Final = 8
_MAX_THREADS: Final = 8
_DUMMY_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_T = TypeVar("_T")
_A = TypeVar("_A")
_P = TypeVar("_P", QuantizedWeight, PackedWeight)

Shape = tuple[int, ...]


class WeightSource(Protocol):
    """Tensors of a checkpoint by parameter name."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors there are."""

    def read(self, name: str, out: Tensor) -> None:
        """Write a tensor to out, a contiguous tensor of its shape and any floating type on the CPU."""

    def dtype(self, name: str) -> torch.dtype:
        """Give the type that holds a tensor's numbers without loss; float32 when it is quantised."""

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's own memory as a tensor when it already holds that type, else None."""

    def blocks(self, name: str) -> QuantizedBlocks | AffineBlocks | None:
        """Give a matrix's blocks as the file has them, None when it is not quantised."""

    def rope_divisors(self) -> Tensor | None:
        """Give the file's divisors of rotary frequencies, if it has any."""


class RenamedSource:
    """A source whose tensors go by other names; those that rename gives None for are left out."""

    def __init__(self, source: WeightSource, rename: Callable[[str], str | None]) -> None:
        self._source = source
        self._names = {own: name for name in source.shapes if (own := rename(name)) is not None}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors there are, by their new names."""
        return {own: self._source.shapes[name] for own, name in self._names.items()}

    def read(self, name: str, out: Tensor) -> None:
        """Write a tensor to out."""
        self._source.read(self._names[name], out)

    def dtype(self, name: str) -> torch.dtype:
        """Give the type that holds a tensor's numbers without loss; float32 when it is quantised."""
        return self._source.dtype(self._names[name])

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's own memory as a tensor when it already holds that type, else None."""
        return self._source.mapped(self._names[name], dtype)

    def blocks(self, name: str) -> QuantizedBlocks | AffineBlocks | None:
        """Give a matrix's blocks as the file has them, None when it is not quantised."""
        return self._source.blocks(self._names[name])

    def rope_divisors(self) -> Tensor | None:
        """Give the file's divisors of rotary frequencies, if it has any."""
        return self._source.rope_divisors()


def open_weights(
    checkpoint: Checkpoint,
    expected: Mapping[str, Shape],
    *,
    dummy_seed: int | None,
    rename: Callable[[str], str | None] | None = None,
) -> WeightSource:
    """Open a checkpoint's weights, or random ones when dummy_seed is set, and check them against the architecture.

    rename gives the architecture's name of a file's tensor, None for one that it has no use for. Raises ConfigError
    (exit code MODEL) that counts and names tensors that lack, do not fit or do not belong.
    """
    if dummy_seed is not None:
        return DummySource(expected, dummy_seed, _DUMMY_DTYPES.get(checkpoint.arch.checkpoint_dtype, torch.float32))
    source: WeightSource
    if checkpoint.format == "gguf":
        source = GGUFSource(checkpoint.weight_files[0], checkpoint.arch)
    elif checkpoint.quantization is not None:
        source = QuantizedSafetensorsSource(
            checkpoint, checkpoint.quantization, lambda name: (name if rename is None else rename(name)) in expected
        )
    else:
        source = SafetensorsSource(checkpoint.weight_files)
    if rename is not None:
        source = RenamedSource(source, rename)
    _check_parameters(checkpoint, expected, source.shapes)
    return source


def _check_parameters(checkpoint: Checkpoint, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    total = len(expected)
    missing = [name for name in expected if name not in found]
    if missing:
        raise _mismatch(checkpoint, f"checkpoint lacks {len(missing)} of {total} parameters", missing)
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        raise _mismatch(checkpoint, f"{len(wrong)} of {total} parameters have another shape than config says", wrong)
    # A tied head may be stored although it is the embedding.
    extra = [n for n in found if n not in expected and not is_ignored(n) and n != "lm_head.weight"]
    if extra:
        raise _mismatch(checkpoint, f"checkpoint has {len(extra)} tensors that the architecture does not", extra)


def _mismatch(checkpoint: Checkpoint, problem: str, names: list[str]) -> ConfigError:
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    place = checkpoint.weight_files[0] if checkpoint.format == "gguf" else checkpoint.root
    return ConfigError(f"{place}: {problem}: {shown}", ExitCode.MODEL)


class ParameterLoader:
    """Hands out parameters on the device, and runs loading jobs on a few threads.

    dtype         the compute type, which single numbers and vectors get
    weight_dtype  the type that every parameter is rounded to first; None keeps each matrix as the file has it
    int8_activations  layers on quantised weights use them where they pay; a warning says when none does
    A context manager: leaving it ends the threads. What the cache has packed is not read from the source.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
        cache: CacheEntry | None = None,
        int8_activations: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._int8_activations = int8_activations
        self._has_int8_layers = False
        self._source = source
        self._weight_dtype = weight_dtype
        self._cache = cache
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS), thread_name_prefix="load")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        if error is not None:
            return
        if self._cache is not None:
            self._cache.finish()
        if self._int8_activations and not self._has_int8_layers:
            log.warning(
                "--cpu-activations int8 has no effect: no layer of this model has quantised weights that it makes "
                "faster here"
            )

    def parameter(self, *names: str) -> Tensor:
        """Load one tensor in the compute type, or several as one with their rows one after the other."""
        if len(names) == 1:
            return self.matrix(names[0]).to(self.dtype)
        shapes = [self._source.shapes[name] for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((num_rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            fused[row : row + shape[0]] = self.matrix(name)
            row += shape[0]
        return fused

    def matrix(self, name: str) -> Tensor:
        """Load a tensor in its own type, or rounded to the one type of weights; the file's memory where it is that."""
        dtype = self._matrix_dtype(name)
        mapped = self._source.mapped(name, dtype)
        if mapped is None:
            mapped = torch.empty(self._source.shapes[name], dtype=dtype)
            self._source.read(name, mapped)
        return mapped.to(self.device)

    def packed(self, *names: str) -> PackedWeight | None:
        """Load matrices as one, packed for our own product; None when a plain one suits the device."""
        dtype = functools.reduce(torch.promote_types, (self._matrix_dtype(name) for name in names))
        if not ops.packs(self.device.type, dtype):
            return None
        found = self._through_cache(
            PackedWeight, names, lambda: (ops.pack_linear(*(self.matrix(name).to(dtype) for name in names)),)
        )
        return None if found is None else found[0]

    def _matrix_dtype(self, name: str) -> torch.dtype:
        if self._weight_dtype is not None:
            return self._weight_dtype
        own = self._source.dtype(name)
        return torch.float32 if own == torch.float64 else own

    def quantized(self, *names: str) -> tuple[QuantizedWeight, ...] | None:
        """Load matrices as blocks of the file, neighbours of one type as one; None when one is to be dequantised."""
        return self._through_cache(QuantizedWeight, names, lambda: self._pack_quantized(names))

    def takes_int8(self, parts: tuple[QuantizedWeight, ...]) -> bool:
        """Tell whether a layer of these weights is to round its rows to 8 bits: asked for, and faster with some."""
        pays = any(ops.int8_pays(self.device.type, part.type_name) for part in parts)
        takes = self._int8_activations and pays
        self._has_int8_layers |= takes
        return takes

    def _through_cache(
        self, kind: type[_P], names: tuple[str, ...], pack: Callable[[], tuple[_P, ...] | None]
    ) -> tuple[_P, ...] | None:
        """Give matrices as the cache has them, else pack them and leave them to it."""
        if self._cache is None:
            return pack()
        name = "+".join(names)
        found = self._cache.take(name)
        if found is not None:
            kept = tuple(part for part in found if isinstance(part, kind))
            if len(kept) == len(found):
                return kept
        packed = pack()
        if packed is not None:
            self._cache.keep(name, packed)
        return packed

    def _pack_quantized(self, names: tuple[str, ...]) -> tuple[QuantizedWeight, ...] | None:
        if self._weight_dtype not in (None, torch.float32):
            return None
        groups: list[list[QuantizedBlocks | AffineBlocks]] = []
        for name in names:
            blocks = self._source.blocks(name)
            if blocks is None or not ops.quantizes(self.device.type, blocks.type_name, self.dtype):
                return None
            if groups and joinable(groups[-1][0], blocks):
                groups[-1].append(blocks)
            else:
                groups.append([blocks])
        return tuple(ops.pack_quantized(side_by_side(group)) for group in groups)

    def rope_divisors(self) -> Tensor | None:
        """Give the file's divisors of rotary frequencies, if it has any."""
        return self._source.rope_divisors()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Start a job on the loading threads."""
        return self._pool.submit(job)

    def map(self, job: Callable[[_A], _T], items: Iterable[_A]) -> list[_T]:
        """Run a job for each item on the loading threads; results in order."""
        return list(self._pool.map(job, items))
