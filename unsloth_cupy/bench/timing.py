"""Times ops, forward and backward, and compares them with the roofline of the machine."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_DTYPES
from ..core.gpu import cupy
from ..core.op import OPS, Op
from ..core.source import code_digest
from ..core.target import using
from ..memory.planned import Planned, Shapes
from .cases import Call, Scale, draw
from .model_shapes import LARGE, ONLY, SHAPES, Shape
from .report import OURS

HOST_SCALES = (
    Scale(tokens=128, hidden=256, inner=704, vocab=1024),
    Scale(tokens=512, hidden=768, inner=2048, vocab=4096),
)
DEVICE_SCALES = (
    Scale(tokens=2048, hidden=2048, inner=5632, vocab=32768, heads=16, kv_heads=4, dim=128),
    LARGE,
)


def shares(row: dict[str, Any], report: dict[str, Any], clock: Any) -> dict[str, float | None]:
    """Return the speed of a row as a fraction of a copy of the same bytes, and of the roofline.

    The roofline time is the longer of the time of such a copy and the time of a matrix product with
    the same number of operations.  Products of 8-bit codes are compared with the rate of the
    datasheet, as no library here runs them; without it, their roofline is None.
    """
    if not (report["copy_gb_per_s"] and row["bytes"]):
        return {"of_copy": None, "of_roofline": None}
    of_copy = row["gb_per_s"] / report["copy_gb_per_s"]
    if not row["operations"]:
        return {"of_copy": of_copy, "of_roofline": of_copy}
    if OPS[row["op"]].facts.get("integers"):
        rate = report["int8_top_per_s"]
        if rate is None:
            return {"of_copy": of_copy, "of_roofline": None}
    else:
        products = report["product_tflop_per_s"]
        if row["dtype"] not in products:
            products[row["dtype"]] = clock.product_rate(row["dtype"]) / 1e12
        rate = products[row["dtype"]]
    of_product = row["operations"] / row["microseconds"] / 1e6 / rate
    return {"of_copy": of_copy, "of_roofline": max(of_copy, of_product)}


def launches(op: Op[..., Any]) -> bool:
    """Return whether an op or its backward op has a kernel."""
    return op.launch is not None or (op.backward is not None and op.backward.launch is not None)


def shapes_of(name: str, on_gpu: bool) -> list[Shape]:
    """Return the shapes in which to time a forward op: shapes of models, then ascending sizes."""
    named = SHAPES.get(name, ()) if on_gpu else ()
    scales = DEVICE_SCALES if on_gpu else HOST_SCALES
    if named and name in ONLY:
        return [*named]
    return [*named, *(Shape("", scale, {}, KERNEL_DTYPES) for scale in scales)]


def has_backward(shape: Shape) -> bool:
    """Return whether a backward pass is timed too: a call that decodes one token has none."""
    return shape.scale.queries != 1


def timed(
    op: Op[..., Any], clock: Any, gpu: str | None, peers: bool
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Time an op and its backward op in all shapes and dtypes; on a GPU, only with a kernel."""
    place: Callable[[Any], Any] = np.copy
    rng = None
    if gpu is not None:
        place, rng = cupy().asarray, cupy().random.default_rng(0)
    for shape in shapes_of(op.__name__, gpu is not None):
        drawn = draw(op, shape.scale, options=shape.options, numbers=rng)
        for dtype in shape.dtypes:
            forward = drawn.cast(dtype, constants=True).mapped(place)
            if gpu is None or op.launch is not None:
                yield _row(shape.name, forward, forward, None, dtype, clock, gpu, peers)
            backward = op.backward if has_backward(shape) else None
            if backward is not None and (gpu is None or backward.launch is not None):
                outputs = forward.run()
                drawn_seeds = forward.seeds(outputs, every=False, rng=rng)
                seeds = {name: place(a) for name, a in drawn_seeds.items()}
                call = forward.backward(outputs, seeds)
                yield _row(shape.name, call, forward, seeds, dtype, clock, gpu, peers)


def _row(
    case: str,
    call: Call,
    forward: Call,
    seeds: Any,
    dtype: Any,
    clock: Any,
    gpu: str | None,
    peers: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Time a call and its peers; return a row of the report, and notes."""
    others: dict[str, Callable[[], Any]] = {}
    notes: list[str] = []
    if peers:
        from .peers import contestants

        others, notes = contestants(forward, seeds, gpu is not None, compiled=not case)
    ran_as = "NumPy definition on the CPU"
    if gpu is not None:
        kernel = call.mapped(lambda a: a.copy()).launches()
        ran_as = f"{'kernel' if kernel else 'definition'} on {gpu}"
    numbers = counted(call)
    moved = numbers["bytes"]
    seconds, runs = clock([call, *others.values()])
    return {
        "op": call.op.__name__,
        "case": case,
        "dtype": dtype.name,
        **numbers,
        "shapes": shapes(call),
        "ran_as": ran_as,
        "sources": sources(call) if gpu is not None else {},
        "microseconds": seconds[0] * 1e6,
        "runs": runs,
        "gb_per_s": moved / seconds[0] / 1e9 if moved else None,
        "peers": {name: s * 1e6 for name, s in zip(others, seconds[1:], strict=True)},
        "percentiles": dict(
            zip((OURS, *others), (each.percentiles for each in seconds), strict=True)
        ),
    }, notes


def shapes(call: Call) -> dict[str, list[int]]:
    """Return the shapes of the arrays of a call."""
    return {name: list(a.shape) for name, a in call.arrays.items() if a is not None}


def counted(call: Call) -> dict[str, Any]:
    """Return the size of a call in tables, and its bytes and operations."""
    in_place = call.op.__name__.endswith("_")  # overwritten arrays are read and written
    outputs = (call.mapped(lambda a: a.copy()) if in_place else call).run()
    arrays = [a for a in call.arrays.values() if a is not None]
    lead = next((a for a in arrays if a.ndim > 1), arrays[0])  # dloss has one number a row
    return {
        "size": list(lead.shape),
        "bytes": traffic(call, outputs),
        "operations": operations(call, outputs),
    }


class Sources(Shapes):
    """A target of planned arrays that collects the files of kernels."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Return a launch that does nothing."""
        self.files |= {*re.findall(r'^#include "(\w+\.cu)"$', source, re.M)}
        return super().compile(name, source)


def sources(call: Call) -> dict[str, str | None]:
    """Return hashes of the kernel files that a call uses on an H200, by file."""
    target = Sources()
    with using(target):
        call.mapped(lambda a: Planned.of(a.shape, a.dtype)).launches()
    return {file: code_digest(file) for file in sorted(target.files)}


def traffic(call: Call, outputs: dict[str, Any]) -> int:
    """Return the minimum bytes that a call moves: each input and output once.

    The result is 0 if every output is a view of an input.
    """
    special: Callable[[dict[str, Any]], int] | None = call.op.facts.get("traffic")
    inputs = {name: a for name, a in call.arrays.items() if a is not None}
    if special is not None:
        return special(inputs | outputs)
    read = {_address(a): a.nbytes for a in inputs.values()}
    written = {_address(a): a.nbytes for a in outputs.values()}
    written = {address: size for address, size in written.items() if address not in read}
    return sum(read.values()) + sum(written.values()) if written else 0


def operations(call: Call, outputs: dict[str, Any]) -> int:
    """Return the operations of the matrix products of a call; a multiply-add counts as 2."""
    count: Callable[[dict[str, Any]], int] | None = call.op.facts.get("operations")
    return 0 if count is None else int(count(call.options | call.arrays | outputs))


def counts(op: Any, operands: Mapping[str, Any], options: Any, result: Any) -> tuple[int, int]:
    """Return bytes and operations of a call; an array updated in place counts twice."""
    results = result if type(result) is tuple else (result,)
    pairs = zip(op.contract.outputs, results, strict=True)
    outputs = {operand.name: array for operand, array in pairs if array is not None}
    arrays = {name: a for name, a in operands.items() if hasattr(a, "nbytes")}
    call = Call(op, arrays, options)
    moved = traffic(call, outputs)
    if not moved and op.__name__.endswith("_") and "traffic" not in op.facts:
        moved = sum(a.nbytes for a in (*arrays.values(), *outputs.values()))
    return moved, operations(call, outputs)


def _address(array: Any) -> int:
    place = getattr(array, "ctypes", None)
    return int(array.data.ptr if place is None else place.data)
