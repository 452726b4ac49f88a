"""Builds the CPU kernels while the package is installed; all other metadata is in pyproject.toml.

One library for each processor level, chosen when it is loaded. A machine without a C++ compiler
installs the package without them and runs the plain-torch twins.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build import build

SOURCE_FOLDER = Path("serve") / "kernels" / "cpu"
# Contraction would let the compiler choose where to fuse, and so let results depend on its mood.
COMMON_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
VNNI_FLAGS = [*AVX512_FLAGS, "-mavx512vnni"]
DOTPROD_FLAGS = ["-march=armv8.2-a+dotprod"]
# Family of processors, as compilers call it -> library -> flags. The portable one runs on the whole family.
VARIANTS = {
    "x86_64": {"portable": [], "avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS, "avx512vnni": VNNI_FLAGS},
    "aarch64": {"portable": [], "dotprod": DOTPROD_FLAGS},
}
FAMILY_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def processor_family(compiler: list[str]) -> str:
    """Give the family that a compiler compiles for, which need not be this machine's."""
    try:
        done = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
        name = done.stdout.split("-")[0]
    except (OSError, IndexError, subprocess.CalledProcessError):
        name = platform.machine().lower()
    return FAMILY_NAMES.get(name, name)


def variants(compiler: list[str]) -> dict[str, list[str]]:
    """Map each library to its compiler flags."""
    return VARIANTS.get(processor_family(compiler), {"portable": []})


def find_compiler() -> list[str] | None:
    """Give the C++ compiler's command line, None when there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def extra_flags() -> list[str]:
    """Give the flags that the environment adds to every command, as builders of packages expect."""
    return shlex.split(os.environ.get("CXXFLAGS", ""))


def is_current(target: Path, parts: list[Path]) -> bool:
    """Tell whether a file is newer than all that it is made of."""
    if not target.exists():
        return False
    made = target.stat().st_mtime
    return all(part.exists() and part.stat().st_mtime < made for part in [Path(__file__), *parts])


def read_parts(listing: Path) -> list[Path]:
    """Give the sources that the compiler's own listing of an object file names."""
    if not listing.exists():
        return []
    words = listing.read_text(encoding="utf-8").replace("\\\n", " ").split()
    return [Path(word) for word in words[1:] if not word.startswith("/usr/")]


def run_compiler(command: list[str], target: Path) -> str | None:
    """Make a file, which appears whole or not at all; give the reason when that fails."""
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]} does not run: {error}"
    if done.returncode != 0:
        part.unlink(missing_ok=True)
        return done.stderr.strip()
    part.replace(target)
    return None


class BuildKernels(Command):
    """Compile every variant into a folder of the build, or beside the sources."""

    description = "compile the CPU kernels"
    user_options = [
        ("inplace", "i", "put the libraries beside the sources"),
        ("variants=", None, "only these, by comma"),
    ]
    boolean_options = ["inplace"]

    def initialize_options(self) -> None:
        """Set the options to their defaults, as setuptools demands."""
        self.inplace = False
        self.variants = ""
        self.build_lib: str | None = None
        self.build_temp: str | None = None
        self.compiler: list[str] = []
        self.flags: dict[str, list[str]] = {}
        self.editable_mode = False

    def finalize_options(self) -> None:
        """Take the build folders from the build command."""
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("build_temp", "build_temp"))

    def run(self) -> None:
        """Compile every source of every variant side by side; warn and go on when a variant cannot be built."""
        compiler = find_compiler()
        if compiler is None:
            self.warn_about("no C++ compiler found")
            return
        self.compiler, self.flags = compiler, variants(compiler)
        wanted = self.variants.split(",") if self.variants else list(self.flags)
        sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {name: [pool.submit(self.compile, source, name) for source in sources] for name in wanted}
            problems = {name: [problem for job in jobs[name] if (problem := job.result())] for name in wanted}
        for name in wanted:
            problem = problems[name][0] if problems[name] else self.link(name, sources)
            if problem:
                self.warn_about(f"the {name} build failed:\n{problem}")

    def output_folder(self) -> Path:
        """Give the folder for the libraries."""
        if self.inplace or self.editable_mode:
            return SOURCE_FOLDER
        assert self.build_lib is not None, "finalize_options runs first"
        return Path(self.build_lib) / SOURCE_FOLDER

    def object_path(self, source: Path, name: str) -> Path:
        """Give the place of the object file of a source in a variant."""
        assert self.build_temp is not None, "finalize_options runs first"
        return Path(self.build_temp) / "kernels" / name / f"{source.stem}.o"

    def compile(self, source: Path, name: str) -> str | None:
        """Build one object file unless it is current; give the reason when that fails."""
        target = self.object_path(source, name)
        listing = target.with_suffix(".d")
        if is_current(target, [source, *read_parts(listing)]):
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*COMMON_FLAGS, *self.flags[name], *extra_flags(), "-MMD", "-MF", str(listing)]
        return run_compiler([*self.compiler, *flags, "-c", str(source)], target)

    def link(self, name: str, sources: list[Path]) -> str | None:
        """Join the object files of a variant to its library unless that is current; give the reason for a failure."""
        folder = self.output_folder()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"serve_cpu_{name}.so"
        objects = [self.object_path(source, name) for source in sources]
        if is_current(target, objects):
            return None
        return run_compiler([*self.compiler, *map(str, objects), *extra_flags(), "-shared", "-pthread"], target)

    def warn_about(self, problem: str) -> None:
        """Say on stderr that the package will be slower than it could be."""
        sys.stderr.write(
            f"warning: CPU kernels: {problem}\nwarning: plain torch will be used where a kernel is missing\n"
        )

    def get_source_files(self) -> list[str]:
        """List what goes into a source distribution."""
        return sorted(str(path) for pattern in ("*.cpp", "*.h") for path in SOURCE_FOLDER.glob(pattern))

    def get_outputs(self) -> list[str]:
        """List the libraries in the build folder."""
        names = variants(find_compiler() or [])
        return [str(self.output_folder() / f"serve_cpu_{name}.so") for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        """Map nothing: an editable install finds the libraries beside the sources."""
        return {}


class BuildWithKernels(build):
    """The build command with the kernels as one more step."""

    sub_commands = [*build.sub_commands, ("build_kernels", None)]


class BinaryDistribution(Distribution):
    """Marks wheels as made for one platform, since they carry compiled code."""

    def has_ext_modules(self) -> bool:
        """Tell setuptools that there is compiled code although it lists no extension."""
        return True


setup(cmdclass={"build": BuildWithKernels, "build_kernels": BuildKernels}, distclass=BinaryDistribution)
