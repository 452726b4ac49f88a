"""What `pip install .` installs: the console script, the compiled kernels, nothing of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from serve import __version__
from tests.source_tree import ROOT

BUILD_LIMIT_S = 240


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *arguments: str) -> str:
    """Run Python with the unpacked wheel in front of everything else."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_names_the_console_script_and_holds_the_package_only(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    assert "serve = serve.entrypoints.cli:main" in (metadata / "entry_points.txt").read_text()
    assert sorted(p.name for p in installed.iterdir()) == ["serve", metadata.name]


def test_installed_package_runs_as_a_module(installed: Path) -> None:
    assert __version__ in run(installed, "-m", "serve", "--version")
    assert run(installed, "-c", "import serve; print(serve.__file__)").startswith(str(installed))


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler to build with")
def test_installed_package_uses_the_compiled_kernels(installed: Path) -> None:
    code = "from serve.kernels.ops import library_description; print(library_description())"
    assert run(installed, "-c", code).startswith("cpu kernels: ")
