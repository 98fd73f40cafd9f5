"""List the attention kernels on warpgroups that spill registers, over every pair of options.

    python -m tests.code.programs.spills                with the NVRTC of this environment
    python -m tests.code.programs.spills --nvrtc 13.5   with another one, installed if needed
    python -m tests.code.programs.spills packed 128     only calls whose names have these words

It covers heads of 64 to 256 columns, forward and backward, the backward in one launch and in two.
"""

import argparse
import itertools
import sys
from argparse import RawTextHelpFormatter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from unsloth_cupy import (
    AttentionConfig,
    attention_backward,
    attention_forward,
    attention_varlen_backward,
    attention_varlen_forward,
)

from ...machines.stand_in import Launch, Machine, gpu
from . import budget
from .compilers import run_with_nvrtc
from .warpgroup_table import ROWS, call_options, pairs

DIMS = (64, 96, 128, 192, 256)


def call(machine: Machine, dim: int, names: set[str]) -> None:
    """Call attention with some options, forward and backward."""
    options = call_options(machine, *names)
    q = machine.array((ROWS, 2, dim) if "packed" in names else (1, ROWS, 2, dim), "bfloat16")
    if "packed" in names:
        lengths = options.pop("offsets")
        limits = {"max_queries": ROWS, "max_keys": ROWS}
        outputs = attention_varlen_forward(q, q, q, *lengths, **limits, **options)
        attention_varlen_backward(outputs[0], q, q, q, *lengths, *outputs, **limits, **options)
    else:
        outputs = attention_forward(q, q, q, **options)
        attention_backward(outputs[0], q, q, q, *outputs, **options)


def launches(first: int = 0, every: int = 1) -> Iterator[tuple[Launch, str]]:
    """Yield the distinct launches of kernels on warpgroups, each with a name for reports."""
    seen = set()
    calls = itertools.product(DIMS, (False, True), ((), *pairs()))
    for dim, one_pass, names in itertools.islice(calls, first, None, every):
        with AttentionConfig(warpgroups=True, one_pass=one_pass).use(), gpu("90") as machine:
            call(machine, dim, {*names})
            for launch in machine.launches:
                key = launch.source, launch.threads
                if launch.kernel.endswith("_sm90") and key not in seen:
                    seen.add(key)
                    yield launch, f"{launch.kernel} {' '.join([str(dim), *sorted({*names})])}"


def spilled(launch: Launch) -> int:
    """Return the bytes that a kernel spills."""
    used = budget.resources(launch, "90")
    return max(used.spilled, used.local)


def main(words: list[str]) -> None:
    """Compile the kernels whose names contain these words; exit with those that spill."""
    named = [(launch, name) for launch, name in launches() if all(word in name for word in words)]
    with ThreadPoolExecutor(2) as pool:
        sizes = zip(pool.map(spilled, (launch for launch, _ in named)), named, strict=True)
        wrong = [f"{name}: {count} bytes" for count, (_, name) in sizes if count]
    print(f"NVRTC {budget.compiler_version()}: {len(named)} kernels, {len(wrong)} spill")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    command.add_argument("words", nargs="*")
    command.add_argument("--nvrtc", help="12.0, 13.5, ...: the version to use")
    arguments = command.parse_args()
    if arguments.nvrtc and arguments.nvrtc != budget.compiler_version():
        sys.exit(run_with_nvrtc(arguments.nvrtc, "tests.code.programs.spills"))
    main(arguments.words)
