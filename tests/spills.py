"""Which calls of attention on warpgroups have a kernel that spills, of every pair of options.

    python -m tests.spills                   by the NVRTC of this environment
    python -m tests.spills --nvrtc 13.5      by another one, which is installed beside it
    python -m tests.spills packed 128        of the calls whose names have these words

Heads of 64 to 256 columns, forward and backward, in one launch and in two.
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

from . import budget
from .compilers import elsewhere
from .stand_in import Launch, Machine, gpu
from .taken import ROWS, given, pairs

DIMS = (64, 96, 128, 192, 256)


def call(machine: Machine, dim: int, names: set[str]) -> None:
    """Call attention with some options, forward and backward."""
    options = given(machine, *names)
    q = machine.array((ROWS, 2, dim) if "packed" in names else (1, ROWS, 2, dim), "bfloat16")
    if "packed" in names:
        lengths = options.pop("offsets")
        limits = {"max_queries": ROWS, "max_keys": ROWS}
        found = attention_varlen_forward(q, q, q, *lengths, **limits, **options)
        attention_varlen_backward(found[0], q, q, q, *lengths, *found, **limits, **options)
    else:
        found = attention_forward(q, q, q, **options)
        attention_backward(found[0], q, q, q, *found, **options)


def asked(first: int = 0, every: int = 1) -> Iterator[tuple[Launch, str]]:
    """Return what calls launch on warpgroups, each once, with a name for reports."""
    seen = set()
    calls = itertools.product(DIMS, (False, True), ((), *pairs()))
    for dim, one_pass, several in itertools.islice(calls, first, None, every):
        with AttentionConfig(warpgroups=True, one_pass=one_pass).use(), gpu("90") as machine:
            call(machine, dim, {*several})
            for launch in machine.launches:
                key = launch.source, launch.threads
                if launch.kernel.endswith("_sm90") and key not in seen:
                    seen.add(key)
                    yield launch, f"{launch.kernel} {' '.join([str(dim), *sorted({*several})])}"


def spilled(launch: Launch) -> int:
    """Return the bytes that a kernel spills."""
    used = budget.resources(launch, "90")
    return max(used.spilled, used.local)


def main(words: list[str]) -> None:
    """Compile those whose names have these words; exit with those that spill."""
    several = [(launch, name) for launch, name in asked() if all(word in name for word in words)]
    with ThreadPoolExecutor(2) as pool:
        found = zip(pool.map(spilled, (launch for launch, _ in several)), several, strict=True)
        wrong = [f"{name}: {count} bytes" for count, (_, name) in found if count]
    print(f"NVRTC {budget.compiler_version()}: {len(several)} kernels, {len(wrong)} spill")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    command.add_argument("words", nargs="*")
    command.add_argument("--nvrtc", help="12.0, 13.5, ...: of another version, which is installed")
    asked_for = command.parse_args()
    if asked_for.nvrtc and asked_for.nvrtc != budget.compiler_version():
        sys.exit(elsewhere(asked_for.nvrtc, "tests.spills"))
    main(asked_for.words)
