"""What all instructions share: types, special registers, and the table of those that are known.

@instruction("bra")
def bra(f, words, ops):      f the Function, words what follows the dots, ops the operands
    return "goto ...;"       a statement of C++
"""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from .parse import Piece, UnknownError, operands

if TYPE_CHECKING:
    from .translate import Function

Write = Callable[["Function", list[str], list[str]], str]
INSTRUCTIONS: dict[str, Write] = {}

# The C++ type as which an instruction reads a register; and the register's own.
WIDTH = {"pred": "bool", "b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "f16": "u16"}
WIDTH |= {"bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "b32": "u32", "tf32": "u32", "b64": "u64"}
WIDTH |= {f"{k}{n}": f"{k}{n}" for k in "us" for n in (16, 32, 64)}
WIDTH |= {"f32": "f32", "f64": "f64", "f32x2": "u64", "e4m3x2": "u16", "e5m2x2": "u16"}
BITS = {"bool": "bool", "u8": "u8", "s8": "u8", "f32": "u32", "f64": "u64"}
BITS |= {f"{k}{n}": f"u{n}" for k in "us" for n in (16, 32, 64)}
SIZE = {"bool": 1, **{kind: int(kind[1:]) // 8 for kind in BITS if kind != "bool"}}
PLACES = (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
SPECIAL = {f"{name}.{axis}": f"{var}.{axis}" for axis in "xyz" for name, var in PLACES} | {
    "laneid": "lane_id()",
    "warpid": "(M.cur->index % M.stride / 32)",
    "clock": "0",
    "clock64": "0",
    "globaltimer": "0",
    "smid": "0",
    "cluster_ctarank": "M.cur->rank",
    "cluster_nctarank": "M.blocks",
    "lanemask_eq": "(1u << lane_id())",
    "lanemask_lt": "((1u << lane_id()) - 1)",
    "lanemask_le": "(~0u >> (31 - lane_id()))",
    "lanemask_gt": "(~1u << lane_id())",
    "lanemask_ge": "(~0u << lane_id())",
}
ROUND = {"rn": "NEAREST", "rz": "TO_ZERO", "rm": "DOWN", "rp": "UP"}


def instruction(*names: str) -> Callable[[Write], Write]:
    """Keep a function as what writes the instructions of these names."""

    def keep(write: Write) -> Write:
        INSTRUCTIONS.update(dict.fromkeys(names, write))
        return write

    return keep


def only(words: list[str], known: str) -> None:
    """Raise UnknownError for a word that is not known."""
    if strange := set(words) - {*known.split()}:
        raise UnknownError(f"no .{' .'.join(sorted(strange))}")


def flag(value: bool) -> str:
    """Return true or false of C++."""
    return str(value).lower()


class Poison:
    """The accumulators of products in flight: registers that wgmma writes, and copies of them.

    Until the wait such a register holds the name of its sum, which a move carries along; whatever
    computes with one fails.  The wait puts sums where their names have come to.
    """

    MOVES: ClassVar = ("mov", "selp", "wgmma")

    def __init__(self, pieces: list[Piece]) -> None:
        edges: list[tuple[str, str]] = []
        self.registers: set[str] = set()
        for piece in pieces:
            if "wgmma.mma_async" in piece.text:
                self.registers |= {*operands(piece.text[piece.text.index("{") + 1 :].split("}")[0])}
            elif found := re.match(r"(?:@\S+ )?(?:mov|selp)\.[bf]32\s+(.*)", piece.text):
                target, *sources = operands(found[1])
                edges += [(target, source) for source in sources[:2]]
        reached = 0
        while self.registers and reached < len(self.registers):
            reached = len(self.registers)
            self.registers |= {target for target, source in edges if source in self.registers}

    def declared(self, f: "Function") -> Iterator[str]:
        """Yield what a function declares of them."""
        if self.registers:
            found = (f.register(name) for name in sorted(self.registers))
            yield "Products products;"
            yield f"u32 *const sums[] = {{{', '.join(f'&{each[0]}' for each in found if each)}}};"
