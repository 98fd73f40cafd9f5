"""Compile one variant of every kernel with the oldest and the newest supported NVRTC.

    python -m tests.code.programs.compilers             installs both, inside this environment
    python -m tests.code.programs.compilers 13.5        the newest alone; or any other version
    python -m tests.code.programs.compilers --here      uses the NVRTC of this environment

An environment has NVRTC and the headers of the same version; it shares all other packages with the
environment that this program runs in.  Kernels alternate between the architectures.  A kernel that
does not compile is an error; spilled registers are only reported, as ``costs.toml`` is valid for
one compiler.
"""

import argparse
import subprocess
import sys
import sysconfig
import venv
from argparse import RawTextHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unsloth_cupy.errors import KernelError
from unsloth_cupy.ops.common.tensor_map import NVRTC

from . import budget
from .variants import ARCHITECTURES, Variant, constants, declared, of_kernel

OLDEST, NEWEST = "12.0", "13.5"


def wheels(version: str) -> list[str]:
    """Return the requirements for pip: NVRTC, and the headers of the same version."""
    suffix = "-cu12" if version.startswith("12.") else ""
    return [f"nvidia-cuda-{part}{suffix}=={version}.*" for part in ("nvrtc", "runtime")]


def environment(version: str) -> Path:
    """Return the Python of an environment with this NVRTC; create it inside this one if needed."""
    folder = Path(sys.prefix) / f"nvrtc-{version}"
    bases = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", bases))
    link = site / "base.pth"  # written last, so that it marks a complete environment
    if not link.exists():
        venv.create(folder, clear=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        subprocess.run([*pip, *wheels(version)], check=True)
        link.write_text(sysconfig.get_path("purelib") + "\n")
    return Path(sysconfig.get_path("scripts", "venv", bases)) / "python"


def run_with_nvrtc(version: str, module: str) -> int:
    """Run a module with another NVRTC and this process's arguments; return its exit status."""
    command = [environment(version), "-m", module, *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


def supported() -> list[str]:
    """Return the architectures that NVRTC compiles for."""
    from cupy.cuda import nvrtc

    known = nvrtc.getSupportedArchs()
    return [arch for arch in ARCHITECTURES if int(arch) in known]


def headers() -> list[Path]:
    """Return the folders in which CuPy lets NVRTC look for cuda_fp16.h."""
    from cupy._core.core import assemble_cupy_compiler_options

    options = assemble_cupy_compiler_options(())
    folders = [Path(option[2:]) for option in options if option.startswith("-I")]
    return [folder for folder in folders if (folder / "cuda_fp16.h").exists()]


def inside(folder: Path) -> bool:
    """Return whether a folder belongs to this environment, not to a system-wide CUDA toolkit."""
    return folder.resolve().is_relative_to(Path(sys.prefix).resolve())


def compile_error(variant: Variant) -> str | None:
    """Compile a variant; return NVRTC's error, or None; print how many bytes it spills, if any."""
    launch = variant.launch
    try:
        log = budget.cubin(launch.source, launch.options, variant.arch)[1]
    except KernelError as error:
        return f"{variant}: {error}"
    used = budget.read_log(log)[variant.kernel]
    if used.spilled or used.local:
        print(f"{variant}: {used.spilled} bytes spilled, {used.local} of local memory")
    return None


def supported_options(variants: Sequence[Variant], version: str) -> bool:
    """Return whether this NVRTC accepts the options of a kernel: a second -arch is new in 12.9."""
    newer = tuple(map(int, version.split("."))) >= NVRTC
    return newer or "-arch=sm_90a" not in variants[0].launch.options


def in_cluster(variant: Variant) -> bool:
    """Return whether the blocks of a variant form clusters."""
    return int(constants(variant.launch.source).get("CLUSTER", 1)) > 1


def chosen(version: str) -> list[Variant]:
    """Return one variant of every kernel, and one in a cluster."""
    archs = supported()
    variants = []
    for number, kernel in enumerate(declared()):
        several = of_kernel(kernel, archs[number % len(archs)]) or of_kernel(kernel, "90")
        if supported_options(several, version):
            variants.append(several[number % len(several)])
        if "90" in archs:  # some instructions occur in the blocks of a cluster only
            variants += [v for v in of_kernel(kernel, "90") if in_cluster(v)][-1:]
    return variants


def try_here(wanted: str | None = None) -> None:
    """Compile the chosen variants; exit with the errors of those that do not compile."""
    version, folders = budget.compiler_version(), headers()
    print(f"NVRTC {version}, headers in {', '.join(map(str, folders))}")
    if wanted and not (version == wanted and [*map(inside, folders)] == [True]):
        sys.exit(f"NVRTC {wanted} and its headers should be installed in {sys.prefix}")
    variants = chosen(version)
    with ThreadPoolExecutor(2) as pool:
        failures = [error for error in pool.map(compile_error, variants) if error is not None]
    count = f"{len(variants) - len(failures)} of {len(variants)}"
    print(f"{count} variants compile for {', '.join(supported())}")
    if failures:
        sys.exit("\n".join(failures))


def try_each(versions: Sequence[str]) -> None:
    """Compile with these versions of NVRTC; exit with the status of the first failure."""
    for version in versions:
        command = [environment(version), "-m", "tests.code.programs.compilers", "--here", version]
        done = subprocess.run(command, check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    command.add_argument("versions", nargs="*")
    command.add_argument("--here", nargs="?", const="", metavar="VERSION")
    arguments = command.parse_args()
    if arguments.here is None:
        try_each(arguments.versions or (OLDEST, NEWEST))
    else:
        try_here(arguments.here)
