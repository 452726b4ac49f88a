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
COMMON_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
VNNI_FLAGS = [*AVX512_FLAGS, "-mavx512vnni"]
X86_MACHINES = {"x86_64", "AMD64", "amd64"}


def variants() -> dict[str, list[str]]:
    """Map each library of this machine's processor family to its compiler flags."""
    if platform.machine() in X86_MACHINES:
        return {"portable": [], "avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS, "avx512vnni": VNNI_FLAGS}
    return {"portable": []}


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


def newest_source() -> float:
    """Give the time of the last change to anything that a library is made of."""
    paths = [Path(__file__), *SOURCE_FOLDER.glob("*.cpp"), *SOURCE_FOLDER.glob("*.h")]
    return max(path.stat().st_mtime for path in paths)


class BuildKernels(Command):
    """Compile every variant into a folder of the build, or beside the sources."""

    description = "compile the CPU kernels"
    user_options = [("inplace", "i", "put the libraries beside the sources")]
    boolean_options = ["inplace"]

    def initialize_options(self) -> None:
        """Set the options to their defaults, as setuptools demands."""
        self.inplace = False
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        """Take the build folder from the build command."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Compile the variants side by side; warn and go on when one cannot be built."""
        compiler = find_compiler()
        if compiler is None:
            self.warn_about("no C++ compiler found")
            return
        folder = self.output_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            problems = list(pool.map(lambda item: self.compile(compiler, folder, *item), variants().items()))
        for problem in filter(None, problems):
            self.warn_about(problem)

    def output_folder(self) -> Path:
        """Give the folder for the libraries."""
        if self.inplace or self.editable_mode:
            return SOURCE_FOLDER
        assert self.build_lib is not None, "finalize_options runs first"
        return Path(self.build_lib) / SOURCE_FOLDER

    def compile(self, compiler: list[str], folder: Path, name: str, flags: list[str]) -> str | None:
        """Build one library; give the reason when that fails."""
        target = folder / f"serve_cpu_{name}.so"
        if target.exists() and target.stat().st_mtime > newest_source():
            return None
        part = target.with_suffix(f".{os.getpid()}.part")
        sources = sorted(str(path) for path in SOURCE_FOLDER.glob("*.cpp"))
        command = [*compiler, *COMMON_FLAGS, *flags, *sources, "-o", str(part)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{compiler[0]} does not run: {error}"
        if done.returncode != 0:
            part.unlink(missing_ok=True)
            return f"the {name} build failed:\n{done.stderr.strip()}"
        part.replace(target)
        return None

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
        return [str(self.output_folder() / f"serve_cpu_{name}.so") for name in variants()]

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
