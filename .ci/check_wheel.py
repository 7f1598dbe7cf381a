"""Checks wheels before they are published: what is in them, and that they run where nothing but Python is installed.

    .ci/check_wheel.py dist/*.whl --python python3.11 python3.12 python3.13

Each wheel is installed with the extra ``cli`` for every given Python that it is for. Then ``telegrad doctor`` and
``telegrad test -n 2`` run in a root directory of their own (mount namespace, chroot). It has the system's libraries,
that Python and the environment, but no compiler, no other program and no torch. Needs root or user namespaces.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

LARGEST_MB = 12.0
BUNDLED = tuple(f"telegrad/_ucx/lib/libtelegrad_{name}.so.0" for name in ("ucm", "ucp", "ucs", "uct"))
CMA = "telegrad/_ucx/lib/ucx/libuct_cma.so.0"
OTHERS = (
    "telegrad/__init__.py",
    "telegrad/py.typed",
    "telegrad/_ucx/LICENSE",
    "telegrad_autoload/__init__.py",
)
# Which library each module may load beside those that every manylinux system has, and those beside it.
MPI = {"_core": None, "_mpi": "libmpi.so.12", "_mpi_abi": "libmpi_abi.so.1"}
# glibc's and libstdc++: manylinux promises them.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
# In the bare root: programs that must not be there, and one module.
ABSENT = ("cc", "gcc", "g++", "c++", "clang", "make", "cmake", "ninja", "ld", "as", "mpicc", "mpicxx", "git")


@dataclass(frozen=True)
class Name:
    """The parts of a wheel's file name that say where it can be installed."""

    python: str
    abi: str
    platforms: tuple[str, ...]

    @staticmethod
    def of(wheel: Path) -> Name:
        """Raises ``ValueError`` if the name is none of a wheel."""
        parts = wheel.name.removesuffix(".whl").split("-")
        if wheel.suffix != ".whl" or len(parts) not in (5, 6):
            raise ValueError(f"{wheel.name} is not named as a wheel: NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
        python, abi, platforms = parts[-3:]
        return Name(python, abi, tuple(platforms.split(".")))

    def is_for(self, version: tuple[int, int]) -> bool:
        """Whether CPython of this version can install it."""
        least = (int(self.python[2]), int(self.python[3:]))
        return version >= least if self.abi == "abi3" else version == least


def problems_of(wheel: Path) -> list[str]:
    """What must not be published so, by the wheel's name and its files; nothing is installed."""
    found = []
    name = Name.of(wheel)
    if not all(platform.startswith("manylinux_") for platform in name.platforms):
        found.append(f"its platform is {'.'.join(name.platforms)}: only manylinux can be published (auditwheel repair)")
    size_mb = wheel.stat().st_size / 1e6
    if size_mb > LARGEST_MB:
        found.append(f"it has {size_mb:.1f} MB: {LARGEST_MB:g} MB at most")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        suffix = "abi3" if name.abi == "abi3" else f"cpython-{name.python[2:]}-x86_64-linux-gnu"
        modules = {f"telegrad/{module}.{suffix}.so": mpi for module, mpi in MPI.items()}
        found += [f"{wanted} is missing" for wanted in (*modules, *BUNDLED, CMA, *OTHERS) if wanted not in names]
        foreign = [n for n in names if not re.match(r"telegrad/|telegrad_autoload/|telegrad-[^/]+\.dist-info/", n)]
        found += [f"{path} does not belong into it" for path in foreign]
        for path in names:
            if re.search(r"\.so(\.|$)", path):
                if path not in (*modules, *BUNDLED, CMA):
                    found.append(f"{path} is a library that it should not carry")
                found += [
                    f"{path} {problem}" for problem in _problems_of_library(archive.read(path), modules.get(path))
                ]
    return found


def _problems_of_library(content: bytes, mpi: str | None) -> list[str]:
    dynamic = ELFFile(io.BytesIO(content)).get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return ["is no shared library"]
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    paths = [tag.rpath for tag in dynamic.iter_tags("DT_RPATH")] + [
        tag.runpath for tag in dynamic.iter_tags("DT_RUNPATH")
    ]
    ours = {Path(path).name for path in BUNDLED}
    found = [
        f"needs {library}, which not every system has"
        for library in needed
        if not SYSTEM.fullmatch(library) and library not in ours and library != mpi
    ]
    if mpi is not None and mpi not in needed:
        found.append(f"does not need {mpi}: it was built for another MPI")
    if mpi is not None and paths:
        found.append(f"looks for libraries in {paths[0]}: it must take the MPI that is loaded")
    built = [path for path in paths if not path.startswith("$ORIGIN")]
    found += [f"looks for libraries in {path}, a folder of the build" for path in built]
    return found


# $1: an empty folder, $2: the environment, $3: the prefix of its Python, then the command.
_IN_BARE_ROOT = """
set -eu
root=$1 environment=$2 prefix=$3
shift 3
mount --make-rprivate /
mount -t tmpfs none "$root"
mkdir -p "$root"/usr/bin "$root"/etc "$root"/tmp "$root"/dev "$root"/proc "$root"/sys
ln -s usr/bin "$root"/bin
for folder in /lib /lib32 /lib64 /libx32 /usr/lib /usr/lib32 /usr/lib64; do
  if [ -L "$folder" ]; then
    ln -s "$(readlink "$folder")" "$root$folder"
  elif [ -d "$folder" ]; then
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
  fi
done
for compilers in /usr/lib/gcc /usr/lib/gcc-cross /usr/libexec/gcc /usr/lib/llvm*; do
  if [ -d "$root$compilers" ]; then mount -t tmpfs none "$root$compilers"; fi
done
for file in passwd group hosts nsswitch.conf resolv.conf ld.so.cache; do
  if [ -e "/etc/$file" ]; then cp "/etc/$file" "$root/etc/$file"; fi
done
for folder in /dev /proc /sys; do mount --rbind "$folder" "$root$folder"; done
mount -t tmpfs none "$root"/tmp
for folder in "$prefix" "$environment"; do
  if [ "$folder" = /usr ]; then
    cp /usr/bin/python3* "$root"/usr/bin
  else
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
  fi
done
chroot=$(command -v chroot)
exec env -i PATH="$environment/bin" HOME=/tmp LANG=C.UTF-8 "$chroot" "$root" "$@"
"""


def run_bare(python: Path, *command: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` in a root directory that has the system's libraries and the environment of ``python``.

    Raises ``RuntimeError`` where this system allows no mount namespace.
    """
    environment = python.parent.parent
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    become_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", "--mount", *become_root]
    allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if allowed.returncode != 0:
        why = allowed.stderr.strip()
        raise RuntimeError(f"`{' '.join(unshare)}` fails ({why}): run as root, or allow user namespaces")
    with tempfile.TemporaryDirectory(prefix="bare-") as root:
        return subprocess.run(
            [*unshare, "bash", "-c", _IN_BARE_ROOT, "bare", root, environment, prefix, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


_LOOK_ROUND = f"""
import importlib.util, json, os, shutil
path = os.environ["PATH"] + ":/usr/bin:/usr/local/bin:/usr/sbin"
found = [name for name in {ABSENT!r} if shutil.which(name, path=path)]
print(json.dumps(found + (["torch"] if importlib.util.find_spec("torch") else [])))
"""


def found_in_bare_root(python: Path) -> list[str]:
    """Programs and modules that a bare root for ``python`` should not have."""
    done = run_bare(python, str(python), "-c", _LOOK_ROUND)
    if done.returncode != 0:
        raise RuntimeError(
            f"the bare root cannot be made, or {python} does not start in it:\n{done.stdout}{done.stderr}"
        )
    return list(json.loads(done.stdout))


def run_wheel(wheel: Path, python: str, folder: Path) -> list[str]:
    """Installs the wheel into a new environment of ``python`` in ``folder`` and runs it bare; what went wrong."""
    own = folder / "bin" / "python"
    pip = [own, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--only-binary", ":all:"]
    constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
    subprocess.run([python, "-m", "venv", folder], check=True)
    subprocess.run([*pip, "-c", constraints, f"{wheel.resolve()}[cli]"], check=True)
    found = found_in_bare_root(own)
    if found:
        return [f"the bare root has {', '.join(found)}"]
    for arguments in (("doctor",), ("test", "-n", "2")):
        done = run_bare(own, str(own), str(own.with_name("telegrad")), *arguments)
        print(f"$ telegrad {' '.join(arguments)}\n{done.stdout.rstrip()}", flush=True)
        if done.returncode != 0:
            return [f"`telegrad {' '.join(arguments)}` ended with {done.returncode}: {done.stderr.strip()}"]
    return []


def version_of(python: str) -> tuple[int, int]:
    program = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return int(major), int(minor)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks wheels before they are published.")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--python", nargs="+", required=True, help="Pythons with which the wheels are run")
    asked = parser.parse_args()
    bad = 0
    for wheel in asked.wheels:
        problems = problems_of(wheel)
        pythons = [python for python in asked.python if Name.of(wheel).is_for(version_of(python))]
        if not pythons:
            problems.append(f"none of the given Pythons can install it: {', '.join(asked.python)}")
        for python in pythons if not problems else []:
            under = ".".join(map(str, version_of(python)))
            print(f"\n-- {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, under Python {under}")
            with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
                problems += run_wheel(wheel, python, Path(folder))
        for problem in problems:
            print(f"error: {wheel.name}: {problem}", file=sys.stderr)
        bad += bool(problems)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
