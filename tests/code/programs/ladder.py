"""What each optimization of a kernel gains: the tables of docs/ladders.md.

    python -m tests.code.programs.ladder --write      rewrites them (needs the extra ``test``)

A rung is a kernel of the library with only some of its optimizations: the same source, launched
with other constants.  The first rung is the plain kernel that the source begins with.  Registers
and instructions are those of the code that NVRTC compiles; memory traffic is counted in a run on
the emulator.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np

from unsloth_cupy import AttentionConfig, attention_forward, rms_norm_forward
from unsloth_cupy.core.source import Constants, translation_unit
from unsloth_cupy.core.target import target_of, using
from unsloth_cupy.files import atomic_path
from unsloth_cupy.ops.attention import _forward, _hopper, _tiles
from unsloth_cupy.ops.attention._tiles import Tiles
from unsloth_cupy.ops.norms import _norm

from ...harness.parity import general_attention
from ...machines.cuda_on_cpu import Emulator
from ...machines.cuda_on_cpu.traffic import Traffic, counted
from ...machines.stand_in import gpu
from . import budget, sass
from .variants import Variant

PAGE = Path(__file__).parents[3] / "docs/ladders.md"
ARCHITECTURE = "90"


class Ladder(NamedTuple):
    """A kernel, the shapes of a call, its rungs by what they add, the columns of its table."""

    name: str
    op: Any
    shapes: tuple[tuple[int, ...], ...]
    rungs: dict[str, Any]
    patch: Callable[[Any], Any]  # turns a rung into the patch under which the op launches it
    columns: dict[str, Callable[[Variant, Traffic], str]]


def registers(variant: Variant, traffic: Traffic) -> str:
    """Return the registers of a thread."""
    return str(budget.numbers(variant)[0])


def occupancy(variant: Variant, traffic: Traffic) -> str:
    """Return the share of an SM's threads that can be resident."""
    return f"{budget.numbers(variant)[3]} %"


def shared(variant: Variant, traffic: Traffic) -> str:
    """Return the KiB of shared memory of a block."""
    return str(sum(budget.numbers(variant)[1:3]) // 1024)


def per_product(variant: Variant, traffic: Traffic) -> str:
    """Return the instructions of the loop over keys, divided by its tensor-core products."""
    loop = sass.tile_loop(sass.disassembled(variant))
    if not loop.products:
        return "none"
    return f"{loop.instructions / loop.products:.2f}"


def requests(variant: Variant, traffic: Traffic) -> str:
    """Return the number of warps' requests to global memory."""
    return str(traffic.of("global").requests)


def moved(variant: Variant, traffic: Traffic) -> str:
    """Return the KiB moved to and from global memory, in sectors of 32 bytes."""
    return str(traffic.of("global").moved // 32)


def passes(variant: Variant, traffic: Traffic) -> str:
    """Return the passes over shared memory that its reads need."""
    return str(traffic.of("shared", write=False).moved)


def other_constants(changed: dict[str, Any]) -> Any:
    """Return a patch under which norms are launched with these constants changed."""
    library = _norm.constants
    return mock.patch.object(
        _norm, "constants", lambda *a, **more: Constants(**{**library(*a, **more), **changed})
    )


@contextlib.contextmanager
def other_tiles(tiles: Tiles) -> Iterator[None]:
    """Make these tiles the only row of attention's launch table, and the one that calls request."""
    limits = AttentionConfig(tiles.rows, tiles.threads, warpgroups=False)
    with limits.use(), mock.patch.dict(_tiles.FORWARD, {(80, 2, 64): (tiles,)}):
        _tiles.resolve.cache_clear()
        yield
    _tiles.resolve.cache_clear()


def plain(module: ModuleType, name: str, arguments: Callable[..., tuple[Any, ...]]) -> Any:
    """Return a patch under which a module launches the plain kernel of the source that it loads.

    ``arguments`` chooses the number of its threads, and its arguments, from those of a launch.
    """

    def load(file: str, _: str, like: Any, constants: Constants) -> Any:
        source = "#define PLAIN\n" + translation_unit(file, constants)
        compiled = target_of(like).compile(name, source)

        def launch(*args: Any) -> None:
            threads, *values = arguments(*args)
            compiled((-(-threads // 128),), (128,), tuple(values), 0)

        return defaultdict(lambda: launch)  # whatever the shape of the launch

    return mock.patch.object(module, "load", side_effect=load)


def plain_norm(x: Any, weight: Any, _: Any, bias: Any, y: Any, *more: Any) -> tuple[Any, ...]:
    """Return the threads and arguments of the plain kernel for those of norm_forward."""
    *_, rows, _, eps, _ = more
    return rows, x, weight, y, np.int64(rows), np.float32(eps)


def plain_attention(q: Any, k: Any, v: Any, _: Any, out: Any, *more: Any) -> tuple[Any, ...]:
    """Return the threads and arguments of the plain kernel for those of attention_forward."""
    batch, queries, heads, _ = q.shape
    rows, sizes = batch * queries * heads, (queries, k.shape[1], heads, k.shape[2])
    return rows, q, k, v, out, *map(np.int32, (rows, *sizes))


PLAIN = "plain kernel"  # the name of such a rung


LADDERS = (
    Ladder(
        "rms_norm",
        rms_norm_forward,
        ((32, 4096), (4096,)),
        {
            PLAIN: plain(_norm, "rms_norm_plain", plain_norm),
            "one thread per row": {"ROW_THREADS": 1, "LANES": 1, "KEEP": False},
            "one block per row": {"LANES": 1, "KEEP": False},
            "16 bytes per access": {"KEEP": False},
            "row stays in registers": {},
        },
        other_constants,
        {
            "registers per thread": registers,
            "occupancy": occupancy,
            "requests": requests,
            "KiB moved": moved,
        },
    ),
    Ladder(
        "attention",
        attention_forward,
        ((1, 256, 1, 64),) * 3,
        {
            PLAIN: plain(_forward, "attention_plain", plain_attention),
            "16 keys per tile": Tiles(4, 1, 16, False, stages=1),
            "64 keys per tile": Tiles(4, 1, 64, False, stages=1),
            "queries stay in registers": Tiles(4, 1, 64, True, stages=1),
            "32 queries per warp": Tiles(4, 2, 64, True, stages=1),
            "a second stage": Tiles(4, 2, 64, True, blocks=2),
        },
        other_tiles,
        {
            "registers per thread": registers,
            "KiB of shared memory": shared,
            "occupancy": occupancy,
            "instructions per product": per_product,
            "passes over shared memory": passes,
            "KiB moved": moved,
        },
    ),
)


def row(ladder: Ladder, rung: str) -> str:
    """Return the table line of a rung."""
    patch = ladder.rungs[rung] if rung == PLAIN else ladder.patch(ladder.rungs[rung])
    with patch, mock.patch.object(_hopper, "requested", False):  # not on warpgroups
        ladder.op.routes.clear()  # they were recorded without the patch
        with gpu(ARCHITECTURE) as machine:
            ladder.op(*(machine.array(shape, "bfloat16") for shape in ladder.shapes))
        with counted() as traffic, using(Emulator()):
            ladder.op(*(np.ones(shape, ml_dtypes.bfloat16) for shape in ladder.shapes))
    ladder.op.routes.clear()
    (launch,) = machine.launches
    variant = Variant(launch.kernel, rung, ARCHITECTURE, launch)
    cells = [column(variant, traffic) for column in ladder.columns.values()]
    return f"| {' | '.join([rung, *cells])} |"


def table(ladder: Ladder) -> Iterator[str]:
    """Yield the lines of a ladder's table."""
    yield f"| step | {' | '.join(ladder.columns)} |"
    yield "|---" * (1 + len(ladder.columns)) + "|"
    for rung in ladder.rungs:
        yield row(ladder, rung)


def write() -> None:
    """Rewrite the tables."""
    text = PAGE.read_text(encoding="utf-8")
    for ladder in LADDERS:
        begin, end = (f"<!-- {ladder.name}: {word} -->" for word in ("begin", "end"))
        head, tail = text[: text.index(begin)], text[text.index(end) :]
        text = "\n".join([f"{head}{begin}", *table(ladder), tail])
    with atomic_path(PAGE) as partial:
        partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    with general_attention():
        write()
