"""Every kernel, compiled once by the oldest and by the newest NVRTC that is supported.

    python -m tests.compilers             installs both, each in an environment inside this one
    python -m tests.compilers --here      tries the NVRTC of this environment

An environment has NVRTC and its headers, which must be of one version, and sees all other packages
of the one that this runs in.  Architectures take turns.  What a compiler refuses is an error.
Registers that it spills are only told, as ``costs.toml`` holds for one compiler.
"""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unsloth_cupy.errors import KernelError
from unsloth_cupy.ops.common.tensor_map import NVRTC

from . import budget
from .variants import ARCHITECTURES, Variant, constants, declared, of_kernel

OLDEST, NEWEST = "12.0", "13.5"


def wheels(version: str) -> list[str]:
    """Return what pip is asked for: NVRTC, and the headers of the same version."""
    suffix = "-cu12" if version.startswith("12.") else ""
    return [f"nvidia-cuda-{part}{suffix}=={version}.*" for part in ("nvrtc", "runtime")]


def environment(version: str) -> Path:
    """Return the Python of an environment with this NVRTC, which is made once, inside this one."""
    folder = Path(sys.prefix) / f"nvrtc-{version}"
    places = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", places))
    made = site / "base.pth"  # written last
    if not made.exists():
        venv.create(folder, clear=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        subprocess.run([*pip, *wheels(version)], check=True)
        made.write_text(sysconfig.get_path("purelib") + "\n")
    return Path(sysconfig.get_path("scripts", "venv", places)) / "python"


def elsewhere(version: str, module: str) -> int:
    """Run a module as this process was asked to, with another NVRTC; return its exit status."""
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
    """Say whether a folder is one of this environment, not of a system toolkit."""
    return folder.resolve().is_relative_to(Path(sys.prefix).resolve())


def refused(variant: Variant) -> str | None:
    """Compile; return what NVRTC says where it does not, and print what is spilled."""
    launch = variant.launch
    try:
        log = budget.cubin(launch.source, launch.options, variant.arch)[1]
    except KernelError as error:
        return f"{variant}: {error}"
    used = budget.read_log(log)[variant.kernel]
    if used.spilled or used.local:
        print(f"{variant}: {used.spilled} bytes spilled, {used.local} of local memory")
    return None


def supported_options(several: Sequence[Variant], version: str) -> bool:
    """Say whether a kernel is asked for with this NVRTC: a second -arch is new in 12.9."""
    newer = tuple(map(int, version.split("."))) >= NVRTC
    return newer or "-arch=sm_90a" not in several[0].launch.options


def in_cluster(variant: Variant) -> bool:
    """Say whether the blocks of a variant form clusters."""
    return int(constants(variant.launch.source).get("CLUSTER", 1)) > 1


def try_here(wanted: str | None = None) -> None:
    """Compile one variant of every kernel; exit with what does not compile."""
    version, folders = budget.compiler_version(), headers()
    print(f"NVRTC {version}, headers in {', '.join(map(str, folders))}")
    if wanted and not (version == wanted and [*map(inside, folders)] == [True]):
        sys.exit(f"NVRTC {wanted} and its headers should lie in {sys.prefix}")
    archs = supported()
    chosen = []
    for number, kernel in enumerate(declared()):
        several = of_kernel(kernel, archs[number % len(archs)]) or of_kernel(kernel, "90")
        if supported_options(several, version):
            chosen.append(several[number % len(several)])
        if "90" in archs:  # instructions that blocks of a cluster have for themselves
            chosen += [v for v in of_kernel(kernel, "90") if in_cluster(v)][-1:]
    with ThreadPoolExecutor(2) as pool:
        failures = [said for said in pool.map(refused, chosen) if said is not None]
    print(f"{len(chosen) - len(failures)} of {len(chosen)} variants compile for {', '.join(archs)}")
    if failures:
        sys.exit("\n".join(failures))


def try_all() -> None:
    """Compile by the oldest and the newest NVRTC; exit with the first that fails."""
    for version in (OLDEST, NEWEST):
        command = [environment(version), "-m", "tests.compilers", "--here", version]
        done = subprocess.run(command, check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            try_all()
        case ["--here", *version] if len(version) < 2:
            try_here(*version)
        case _:
            sys.exit(__doc__)
