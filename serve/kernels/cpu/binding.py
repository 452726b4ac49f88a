"""Finds, loads and describes the compiled CPU kernels."""

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Raised together with kAbiVersion in library.cpp.
ABI_VERSION = 10
# Best first: build name and the processor level (serve_cpu_level in library.cpp) that it needs.
VARIANTS = (("avx512vnni", 3), ("avx512", 2), ("avx2", 1), ("dotprod", 1), ("portable", 0))
PORTABLE = VARIANTS[-1][0]
# Builds that add byte products in 32 bits, so that 8-bit activations pay for 8-bit codes too (int_lanes.h).
WIDE_BYTE_SUMS = ("avx512vnni", "dotprod")
FOLDER = Path(__file__).parent

OK = 0
OUT_OF_MEMORY = 1
BAD_SLOT = 2
BAD_POSITION = 3
BAD_QUERY_START = 4
BAD_SEQ_LEN = 5
BAD_BLOCK = 6
BAD_ROW = 7
BAD_CACHE = 8
BAD_HEADS = 9
BAD_TOKEN = 11
BAD_TYPE = 12
BAD_SHAPE = 13

_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_PTR = ctypes.c_void_p
_FLOAT = ctypes.c_float

# Entry point -> result and argument types, in the order of the C declaration.
SIGNATURES: dict[str, tuple[type[ctypes.c_int32] | type[ctypes.c_int64] | None, tuple[type, ...]]] = {
    "serve_abi_version": (_I32, ()),
    "serve_cpu_level": (_I32, ()),
    "serve_set_num_threads": (_I32, (_I32,)),
    "serve_num_threads": (_I32, ()),
    "serve_pin_helpers": (_I32, (_PTR, _I32)),
    "serve_run_ranges": (None, (_I64, _I64, _I64, _PTR, _PTR)),
    "serve_rms_norm": (None, (_PTR, _PTR, _PTR, _I64, _I64, _I64, _I64, _I64, _FLOAT)),
    "serve_add_rms_norm": (None, (_PTR, _PTR, _PTR, _PTR, _I64, _I64, _FLOAT)),
    "serve_rope": (_I32, (_PTR, _PTR, _PTR, _I64, _I64, _I64, _I32, _I32, _I32, _PTR, _I64, _I32, _PTR)),
    "serve_linear": (_I32, (_I32, _PTR, _I64, _PTR, _PTR, _PTR, _I64, _I64, _I64, _I64)),
    "serve_packed_bytes": (_I64, (_I32, _I64, _I64)),
    "serve_pack_linear": (_I32, (_I32, _PTR, _PTR, _I64, _I64, _I64)),
    "serve_packed_rows": (_I32, (_I32, _PTR, _PTR, _I64, _PTR, _I64, _I64, _PTR)),
    "serve_quantized_bytes": (_I64, (_I32, _I64, _I64)),
    "serve_pack_quantized": (_I32, (_I32, _PTR, _I64, _PTR, _I64, _I64)),
    "serve_pack_affine": (_I32, (_I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64)),
    "serve_quantized_rows": (_I32, (_I32, _PTR, _PTR, _I64, _PTR, _I64, _I64, _PTR)),
    "serve_quantized_row_bytes": (_I64, (_I64, _I32)),
    "serve_quantize_rows": (_I32, (_PTR, _I64, _PTR, _I64, _I64, _I32)),
    "serve_quantized_linear": (_I32, (_I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64, _I64, _I32)),
    "serve_silu_and_mul": (None, (_PTR, _PTR, _I64, _I64, _I64, _I64)),
    "serve_argmax_rows": (None, (_PTR, _I64, _I64, _I64, _PTR, _PTR)),
    "serve_draw_rows": (_I32, (_PTR, _I64, _I64, _I64, _PTR, _I64, _PTR)),
    "serve_write_kv": (_I32, (_PTR, _PTR, _I64, _I64, _PTR, _PTR, _PTR)),
    "serve_paged_attention": (_I32, (_PTR, _PTR, _I64, _I64, _I32, _PTR, _PTR, _PTR, _PTR)),
    "serve_linear_layer": (_I32, (_PTR, _PTR, _I64, _I64, _PTR, _PTR)),
    "serve_check_stack": (_I32, (_PTR,)),
    "serve_stack_scratch_bytes": (_I64, (_PTR, _I64)),
    "serve_run_stack": (_I32, (_PTR, _PTR, _PTR)),
}


class Fault(ctypes.Structure):
    """The offending values of a refused call; their meaning goes with the returned status."""

    _fields_ = (("a", _I64), ("b", _I64), ("c", _I64))
    a: int
    b: int
    c: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The library and its variant, or why there is none."""

    library: ctypes.CDLL | None
    variant: str
    reason: str


@functools.cache
def load_library() -> LoadResult:
    """Load the best variant for this processor, once a process."""
    portable = FOLDER / f"serve_cpu_{PORTABLE}.so"
    if not portable.exists():
        return LoadResult(None, "", "built without a C++ compiler; install g++ and reinstall serve for speed")
    problems: list[str] = []
    try:
        # Says what the processor can do, whatever version it has.
        level = int(ctypes.CDLL(str(portable)).serve_cpu_level())
    except (OSError, AttributeError) as error:
        level = 0
        problems.append(str(error))
    for variant, needed_level in VARIANTS:
        path = FOLDER / f"serve_cpu_{variant}.so"
        if needed_level > level or not path.exists():
            continue
        try:
            library = open_library(path)
        except (OSError, AttributeError, ImportError) as error:
            problems.append(str(error))
            continue
        if problems:
            log.warning("cpu kernels: %s; the %s build is used, reinstall serve for the best one", problems[0], variant)
        return LoadResult(library, variant, "")
    log.warning("cpu kernels: no library loads: %s; plain torch is many times slower, reinstall serve", problems[0])
    return LoadResult(None, "", f"library does not load: {problems[0]}; reinstall serve")


def open_library(path: Path) -> ctypes.CDLL:
    """Load one library and declare its entry points; refuse one of another version."""
    library = ctypes.CDLL(str(path))
    library.serve_abi_version.restype = _I32
    version = int(library.serve_abi_version())
    if version != ABI_VERSION:
        raise ImportError(f"{path.name} has version {version}, this package needs {ABI_VERSION}")
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)  # cached there, unlike library[name]
        function.restype = result
        function.argtypes = arguments
    return library


def library() -> ctypes.CDLL:
    """Give the loaded library; only for callers that know there is one."""
    loaded = load_library().library
    assert loaded is not None, "the CPU ops are chosen only when the library is there"
    return loaded


def set_num_threads(num_threads: int) -> int:
    """Set how many threads share a kernel, the caller included, and give the number in force.

    Starts at 1. Without a library the plain-torch twins follow torch's own setting.
    """
    if not 1 <= num_threads <= 256:
        raise ValueError(f"num_threads={num_threads} is outside 1..256")
    loaded = load_library().library
    return num_threads if loaded is None else int(loaded.serve_set_num_threads(num_threads))


def pin_helpers(cpus: Sequence[int]) -> int:
    """Tie each helper thread to one of the processors, in order, and give how many were tied.

    Helpers beyond the list, and all for an empty list, run where the system puts them. The calling thread is not
    touched, and neither are helpers that a later set_num_threads adds.
    """
    loaded = load_library().library
    if loaded is None:
        return 0
    return int(loaded.serve_pin_helpers((ctypes.c_int32 * len(cpus))(*cpus), len(cpus)))


def library_description() -> str:
    """Say in a few words which kernels run on the CPU, for the start-up log."""
    result = load_library()
    if result.library is None:
        return f"plain torch ({result.reason})"
    num_threads = int(result.library.serve_num_threads())
    return f"cpu kernels: {result.variant}, {num_threads} thread{'' if num_threads == 1 else 's'}"
