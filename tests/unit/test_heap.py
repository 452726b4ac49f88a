"""Memory that a start used goes back to the system."""

from __future__ import annotations

import subprocess
import sys

from tests.source_tree import ROOT

# Many small pieces, one behind the other, of which the last one is kept: freeing the others returns nothing by itself.
SCRIPT = """
import ctypes
from serve.heap import return_free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(16384) for _ in range(4096)]
for piece in pieces:
    ctypes.memset(piece, 1, 16384)
for piece in pieces[:-1]:
    libc.free(piece)
before = resident()
return_free_memory()
print(before - resident())
"""


def test_free_pieces_below_one_in_use_are_returned() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 48 << 20
