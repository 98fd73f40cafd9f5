"""Every constant that launch tables can choose is covered by a case of some Parity class.

Calls of many sizes, and of the cases, run through the launch code without a kernel, and the
constants that it chooses are recorded.  A value that no case has is not tested.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call, forward_ops
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.target import Limits, using

from ..harness.parity import Case, KernelAlone, KernelParity, proofs
from ..machines.cuda_on_cpu.build import DYNAMIC_SHARED
from .programs.variants import constants

NOTES: list[tuple[str, str]] = []  # recorded launches: kernel, translation unit
Class = tuple[str, str, Any]  # kernel, constant, class of its value


class Noted(NamedTuple):
    """A Target with the limits of an ``Emulator``, which records launches and runs none."""

    shared_memory: int = DYNAMIC_SHARED
    architecture: int = 90
    clusters: bool = True
    processors: int = 1
    together: int = 1

    def owns(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def compile(self, name: str, source: str) -> Callable[..., None]:
        return lambda *_: NOTES.append((name, source))

    def limits(self, array: Any) -> Limits:
        return Limits(self.architecture, self.shared_memory, self.processors, self.clusters)


def classes(call: Call, sides: tuple[str, ...]) -> set[Class]:
    """Return the classes of the constants in the launches of a call and its backward op."""
    NOTES.clear()
    outputs = call.run()
    if "forward" not in sides:
        NOTES.clear()
    backward = call.op.backward
    if "backward" in sides and backward is not None and backward.launch is not None:
        call.backward(outputs, call.seeds(outputs, every=True)).launches()
    return {
        (kernel, name, bucket(name, value))
        for kernel, source in NOTES
        for name, value in constants(source).items()
        if name not in SIZES
    }


SIZES = {"COLUMNS", "HIDDEN", "DIM", "VALUE_DIM", "HALF", "HEADS", "KV_HEADS", "ROW", "SLICE"}
SIZES |= {"THREADS", "SLOTS", "TOKENS", "RESIDENT", "BLOCKS"}  # these select no other statements
MOST = {"STORED": 1}  # numbers from this one on are one class


def bucket(name: str, value: str) -> Any:
    """Return the class of a value: the power of two below a number, up to 64; or the value."""
    if not value.isdigit():
        return value
    return min(MOST.get(name, 64), 1 << int(value).bit_length() >> 1)


def met(op: str, dtype: Any) -> set[Class]:
    """Return the classes of the constants that the cases of an op have."""
    classes_met: set[Class] = set()
    for proof in proofs():
        judges = issubclass(proof, KernelParity) and not issubclass(proof, KernelAlone)
        if judges and proof.op == op:
            with proof.context(), using(Noted(**proof.machine)):
                for case in proof.cases:
                    call = case.draw(OPS[op], dtype).mapped(np.copy)
                    if all(a is None or a.size for a in call.arrays.values()):
                        classes_met |= classes(call, tuple(proof.sides))
    return classes_met


# near every power of two, and in between; odd ones, for which an access has a single value
AROUND = {n for k in range(5, 18) for n in (2**k - 1, 2**k, 2**k + 8, 3 * 2**k // 2)}
WIDE = sorted({*range(1, 33), *AROUND})
HEAD = [n for n in WIDE if n <= 512]


def rows_of(axis: str, sizes: Any = WIDE, **more: Any) -> list[dict[str, Any]]:
    return [{axis: n, "rows": [2], **more} for n in sizes]


def heads_of(dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"batch": 1, "tokens": 2, "heads": 2, "kv_heads": 1, "dim": dim}
    return sizes | {"half": max(1, dim // 2), "length": 2} | more


TABLES: dict[str, list[dict[str, Any]]] = {
    "softmax": rows_of("columns"),
    "rms_norm_forward": rows_of("hidden"),
    "layer_norm_forward": rows_of("hidden"),
    "cross_entropy_forward": rows_of("vocab", arrays={"labels": [0, 0]}),
    "cross_entropy_over_": rows_of("vocab", arrays={"labels": [0, 0]}),
    "embedding": rows_of("hidden", vocab=2),
    **{name: [{"axes": [2, n]} for n in WIDE] for name in ("add", "swiglu", "geglu", "relu2")},
    **{
        name: [heads_of(n) for n in HEAD if n > 1]
        for name in forward_ops()
        if any("half" in o.axes for o in OPS[name].contract.inputs) and name[-1] != "_"
    },
    "attention_forward": [
        heads_of(n, value_dim=n, queries=queries, keys=20)
        for n in HEAD
        if n % 8 == 0
        for queries in (1, 20)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KERNEL_DTYPES[::2], ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_every_class_has_a_case(name: str, dtype: Any) -> None:
    op = OPS[name]
    optional = [o.name for o in op.contract.inputs if o.optional and o.kind not in ("int", "bool")]
    actual = met(name, dtype)
    missing: dict[Class, Any] = {}
    for sizes in TABLES[name]:
        for operands in ((), optional) if name.endswith("norm_forward") else ((),):
            call = Case("", given=operands, **sizes).draw(op, dtype).mapped(np.copy)
            with using(Noted()):
                for each in classes(call, ("forward", "backward")) - actual:
                    missing.setdefault(each, (sizes, operands))
    assert not missing, "no case meets " + "; ".join(f"{c}: {s}" for c, s in missing.items())
