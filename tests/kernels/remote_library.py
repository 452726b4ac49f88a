"""A kernel library of another instruction set, run by an emulator on this process's own tensors."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from serve.kernels.cpu import binding

ROOT = Path(__file__).parents[2]
RUNNER_SOURCE = Path(__file__).parent / "remote" / "runner.cpp"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
SYSTEM_LIBRARIES = "/usr/aarch64-linux-gnu"
ADDRESS_TAKEN = 77
MAX_ATTEMPTS = 8
REQUEST = struct.Struct("64s32q4f")
PR_SET_PTRACER = 0x59616D61


def missing_tools() -> list[str]:
    """Name what is not installed of what AArch64 needs."""
    return [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]


def build_for_aarch64(folder: Path) -> dict[str, Path]:
    """Cross-compile every variant of the library, and the runner, into a folder; give them by name."""
    sources = folder / "serve" / "kernels" / "cpu"
    shutil.copytree(binding.FOLDER, sources, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", folder)
    build = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_kernels", "--inplace"]
    environment = {**os.environ, "CXX": COMPILER}
    done = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "", done.stderr
    runner = folder / "runner"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-pthread", "-rdynamic", str(RUNNER_SOURCE), "-o", str(runner)]
    subprocess.run([COMPILER, *flags], check=True)
    built = {path.stem.removeprefix("serve_cpu_"): path for path in sources.glob("*.so")}
    return {**built, "runner": runner}


class RemoteFunction:
    """One entry point, called as ctypes would call it."""

    def __init__(self, library: RemoteLibrary, name: str) -> None:
        self._library = library
        self._name = name
        self._result, self._types = binding.SIGNATURES[name]

    def __call__(self, *arguments: object) -> int | None:
        assert len(arguments) == len(self._types), f"{self._name} takes {len(self._types)} arguments"
        floats: list[float] = []
        integers: list[int] = []
        for value, kind in zip(arguments, self._types, strict=True):
            if kind is ctypes.c_float:
                assert isinstance(value, float | int)
                floats.append(value)
            elif kind is ctypes.c_void_p:
                integers.append(_address(value))
            else:
                assert isinstance(value, int)
                integers.append(value)
        result = self._library.call(self._name, integers, floats)
        return None if self._result is None else int(self._result(result).value)


def _address(value: object) -> int:
    """Give what a pointer argument points at, as a signed number of 64 bits."""
    if value is None:
        return 0
    number = value if isinstance(value, int) else ctypes.cast(value, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    return number - (1 << 64) if number >= 1 << 63 else number


class RemoteLibrary:
    """Stands in for the ctypes library; close ends the emulator."""

    def __init__(self, files: dict[str, Path], variant: str) -> None:
        self._command = [EMULATOR, "-L", SYSTEM_LIBRARIES, str(files["runner"]), str(files[variant]), str(os.getpid())]
        # Lets the runner at this process's memory where the system asks for that.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
        self._runner = self._start()
        self._num_threads = 1
        for name in binding.SIGNATURES:
            setattr(self, name, RemoteFunction(self, name))

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, name: str, integers: list[int], floats: list[float]) -> int:
        """Run an entry point in the emulator and give its result register."""
        if name == "serve_set_num_threads":
            self._num_threads = integers[0]
        for _ in range(MAX_ATTEMPTS):
            answer = self._ask(name, integers, floats)
            if answer:
                return int.from_bytes(answer, "little", signed=True)
            self._runner.communicate(timeout=60)
            exit_code = self._runner.returncode
            self._runner = self._start()
            self._ask("serve_set_num_threads", [self._num_threads], [])
            if exit_code != ADDRESS_TAKEN:
                break
        raise AssertionError(f"{name} ended the runner with exit code {exit_code}")

    def _ask(self, name: str, integers: list[int], floats: list[float]) -> bytes:
        assert self._runner.stdin is not None
        assert self._runner.stdout is not None
        padded = [*integers, *[0] * (32 - len(integers)), *floats, *[0.0] * (4 - len(floats))]
        self._runner.stdin.write(REQUEST.pack(name.encode(), *padded))
        self._runner.stdin.flush()
        return self._runner.stdout.read(8)

    def close(self) -> None:
        """End the emulator."""
        self._runner.communicate(timeout=60)
