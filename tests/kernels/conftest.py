"""The implementations that the kernel tests run: the plain twin and each library that there is a processor for.

Libraries for AArch64 run in an emulator, on the tensors of the test.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.cpu import binding
from serve.kernels.cpu import ops as cpu_ops
from serve.kernels.ops import Ops
from tests.kernels.remote_library import RemoteLibrary, build_for_aarch64, missing_tools
from tests.kernels.variants import VARIANTS

NATIVE = [name for name, _ in VARIANTS]
EMULATED = ["aarch64-portable", "aarch64-dotprod"]
# Emulation is slow: of the cases of an emulated library one in this many runs, unless SERVE_TEST_EMULATED=all.
EMULATED_SHARE = 10


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out the cases of emulated libraries, evenly over the files."""
    if os.environ.get("SERVE_TEST_EMULATED") == "all":
        return
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    num_emulated = 0
    for item in items:
        is_dropped = False
        if any(name in item.name for name in EMULATED):
            is_dropped = num_emulated % EMULATED_SHARE != 0
            num_emulated += 1
        (dropped if is_dropped else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def aarch64_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RemoteLibrary]]:
    """Gives the library of an AArch64 variant, running; built and started at the first use."""
    missing = missing_tools()
    if missing:
        pytest.skip(f"AArch64 kernels are not tested without {' and '.join(missing)}")
    files = build_for_aarch64(tmp_path_factory.mktemp("aarch64"))
    libraries: dict[str, RemoteLibrary] = {}

    def start(variant: str) -> RemoteLibrary:
        if variant not in libraries:
            libraries[variant] = RemoteLibrary(files, variant)
        return libraries[variant]

    yield start
    for library in libraries.values():
        library.close()


def use_library(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ops run on one library until the end of the test."""
    if name in EMULATED:
        start: Callable[[str], RemoteLibrary] = request.getfixturevalue("aarch64_library")
        result = binding.LoadResult(start(name.removeprefix("aarch64-")), name.removeprefix("aarch64-"), "")  # type: ignore[arg-type]
        monkeypatch.setattr(binding, "load_library", functools.cache(lambda: result))
        return
    monkeypatch.setattr(binding, "VARIANTS", tuple(v for v in VARIANTS if v[0] == name))
    binding.load_library.cache_clear()


@pytest.fixture(params=[*NATIVE, *EMULATED])
def library_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The CPU library's ops, once for each build."""
    use_library(request.param, request, monkeypatch)
    binding.set_num_threads(1)
    yield cpu_ops
    binding.set_num_threads(1)
    binding.load_library.cache_clear()


@pytest.fixture(params=["twin", *NATIVE, *EMULATED])
def every_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """Every implementation, the plain twin included."""
    if request.param == "twin":
        yield reference
        return
    use_library(request.param, request, monkeypatch)
    yield cpu_ops
    binding.load_library.cache_clear()


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """For tests that change the number of threads."""
    yield None
    ops.set_num_threads(1)
