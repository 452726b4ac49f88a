"""Argmax and draws on the CPU library, for rows of logits."""

import ctypes
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serve.kernels.cpu import binding

# DrawRow in sampling.h: what a draw needs, and in num_kept and token what it gives.
DRAW_ROW: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),
        ("row", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("kept", np.uint64),
        ("num_kept", np.int64),
        ("inverse_temperature", np.float32),
        ("top", np.float32),
        ("top_k", np.int32),
        ("token", np.int32),
    ]
)
FloatTable = NDArray[np.float32]


def argmax_rows(logits: FloatTable) -> tuple[NDArray[np.int64], FloatTable]:
    """Give for each row of logits [n, size] the first index of its largest value or of its first NaN, and the value."""
    num_rows, size = logits.shape
    assert size > 0, "a row without values has no largest one"
    assert logits.strides[1] == logits.itemsize, "the values of a row lie side by side"
    indices, tops = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
    binding.library().serve_argmax_rows(
        logits.ctypes.data, logits.strides[0] // 4, num_rows, size, indices.ctypes.data, tops.ctypes.data
    )
    return indices, tops


def draw_rows(logits: FloatTable, draws: NDArray[np.void]) -> None:
    """Draw a token for each of draws [k] of DRAW_ROW from logits [n, size], which stay unchanged.

    A draw's kept, if not 0, is the address of room for size int32 ids; it gets num_kept of them, ascending. Raises
    ValueError for settings outside their range, MemoryError when there is no room to work in.
    """
    assert logits.strides[1] == logits.itemsize, "the values of a row lie side by side"
    assert draws.dtype == DRAW_ROW, "draws are records of the library"
    assert draws.flags.c_contiguous, "draws lie side by side"
    fault = binding.Fault()
    status = binding.library().serve_draw_rows(
        logits.ctypes.data,
        logits.strides[0] // 4,
        len(logits),
        logits.shape[1],
        draws.ctypes.data,
        len(draws),
        ctypes.addressof(fault),
    )
    if status == binding.BAD_ROW:
        raise ValueError(f"draw {fault.a} of row {fault.b} of {len(logits)} is impossible: {draws[fault.a]}")
    if status == binding.OUT_OF_MEMORY:
        raise MemoryError("there is no memory to draw tokens in")
