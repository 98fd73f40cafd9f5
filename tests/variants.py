"""Every variant of a kernel that the library asks for: calls of all ops, launched on a stand-in.

A variant is what ``cupy.RawModule`` is given and how its kernel is launched.  Calls cover every row
of the launch tables, every option, each optional array alone and all together, every dtype, and
arrays off alignment; those that ask for one and the same variant count once.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    LossScaler,
    attention_backward,
    attention_forward,
    attention_varlen_backward,
    attention_varlen_forward,
    clip_gradients,
    linear_backward,
    measure_gradients,
)
from unsloth_cupy.bench.cases import Call, Scale, forward_ops, sizes
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES, allowed
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.signature import Operand, shape_of
from unsloth_cupy.core.source import source_root
from unsloth_cupy.ops.attention import _backward_hopper, _hopper
from unsloth_cupy.ops.linear.lora import lora_linear_backward

from .cuda_on_cpu.build import kept_file
from .stand_in import LIMITS, Launch, Machine, gpu

ARCHITECTURES = tuple(LIMITS)
SCALE = Scale(tokens=256, hidden=256, inner=512, vocab=512, heads=32, kv_heads=8, dim=128)

# Rows: one of every line of the launch tables, with and without a remainder, and odd ones, of
# which no two values can be accessed at once.
ROWS = (7, 128, 4104, 16384, 131072, 131073)
VECTORS = ({"axes": (4, 4096)}, {"axes": (4, 4096), "shift": 1})  # 16 bytes, or one value
SLICE = {"axes": (4, 4096), "gap": 8}
ASKED = "attention_forward", "attention_varlen_forward"  # they have kernels for warpgroups


@functools.cache
def proofs() -> tuple[Any, ...]:
    """Return the classes that prove ops: those of ``tests/ops`` with the name of an op."""
    paths = sorted((Path(__file__).parent / "ops").glob("test_*.py"))
    modules = [importlib.import_module(f"tests.ops.{path.stem}") for path in paths]
    found = [value for module in modules for value in vars(module).values()]
    return tuple(each for each in found if isinstance(each, type) and hasattr(each, "op"))


def declared_by(op: str, what: str) -> Any:
    """Return what a class that proves an op says itself of sizes or options, if one does."""
    said = (vars(each)[what] for each in proofs() if each.op == op and what in vars(each))
    return next(said, None)


class Asked(NamedTuple):
    """A form of a call: sizes of axes, arrays that are given, dtypes, options."""

    sizes: dict[str, Any]
    given: tuple[str, ...]
    dtype: np.dtype[Any]
    wide: bool  # what may be float32 beside 16-bit arrays is; indices are int32
    options: dict[str, Any]

    def __str__(self) -> str:
        """Return what tells this form from others."""
        words = [self.dtype.name, *(f"{n}={_short(v)}" for n, v in self.sizes.items())]
        words += [*(f"{n}={_short(v)}" for n, v in self.options.items()), *self.given]
        return " ".join([*words, *["wide"] * self.wide])


class Variant(NamedTuple):
    """A kernel as one call, on one architecture, asks for it."""

    kernel: str
    label: str
    arch: str
    launch: Launch

    def __str__(self) -> str:
        """Return a name for reports."""
        return f"sm_{self.arch} {self.kernel} {self.label}"


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def forms(op: Op[..., Any]) -> Iterator[Asked]:
    """Return the forms in which calls of a forward op are made."""
    name = op.__name__
    axes = {axis for operand in op.contract.inputs for axis in operand.axes}
    by_element = (*VECTORS, SLICE) if op.widen and op.strided else VECTORS
    flat = by_element if axes == {"*axes"} else ({},)
    parameters = inspect.signature(op.definition).parameters.values()
    flags = [parameter.name for parameter in parameters if parameter.default is False]
    either = tuple({flag: value} for flag in flags for value in (False, True)) or ({},)
    optional = [operand.name for operand in op.contract.inputs if operand.optional]
    several = declared_by(name, "sizes") or flat
    choices = declared_by(name, "options") or either
    every = {key: value for options in choices for key, value in options.items()}
    middle = several[len(several) // 2]
    for dtype in KERNEL_DTYPES:
        # float16 takes the space of bfloat16 and the same tables: one size shows its arithmetic
        for size in several if dtype.name != "float16" else (middle,):
            yield Asked(size, (), dtype, False, choices[0])
            yield Asked(size, (*optional,), dtype, True, every)
    at = len(several) // 2
    for size in several[at : at + (2 if "queries" in middle else 1)]:  # of few, and of many
        for options in choices[1:]:
            yield Asked(size, (), BFLOAT16, False, options)
        for given in [(), (*optional,), *((each,) for each in optional)]:
            yield Asked(size, given, BFLOAT16, not given, choices[0])


def call(op: Op[..., Any], form: Asked, machine: Machine) -> Call:
    """Return a call of this form whose arrays hold zeros."""
    known = {**sizes(SCALE), "tokens": 4, "rows": (4,), **form.sizes}
    shift = form.sizes.get("shift", 0)

    def made(operand: Operand) -> Any:
        if operand.optional and operand.name not in form.given:
            return None
        choices = allowed(operand.kind, form.dtype)
        if operand.kind == "int":
            choices = choices[::-1]  # int64 is the plain one
        dtype = choices[-1] if form.wide else choices[0]
        shape = shape_of(operand, known) or ()
        if gap := form.sizes.get("gap", 0):  # a slice of a wider array
            return machine.array((*shape[:-1], shape[-1] + gap), dtype)[..., : shape[-1]]
        return machine.array(shape, dtype, shift)

    arrays = {operand.name: made(operand) for operand in op.contract.inputs}
    options = {name: known[name] for name in op.options & known.keys()}
    return Call(op, arrays, options | form.options)


def turned(forward: Call, found: dict[str, Any], machine: Machine, form: Asked) -> Call:
    """Return the call of the backward op; outputs that may have no gradient have one if wide."""
    op: Any = forward.op.backward
    shift = form.sizes.get("shift", 0)
    seeds = {
        f"d{name}": machine.array(array.shape, array.dtype, shift)
        for name, array in found.items()
        if any(o.name == f"d{name}" and (form.wide or not o.optional) for o in op.contract.inputs)
    }
    return forward.backward(found, seeds)


def training_step(machine: Machine, dtype: Any, gradient: Any, bits: int, copies: bool) -> None:
    """Make a step that the device alone decides on; no op, as it takes all tensors together."""
    master = np.dtype("float32") if copies else dtype
    shapes = {"even": (8192,), "odd": (4100,)}
    made = AdamW({n: machine.array(s, master) for n, s in shapes.items()}, state_bits=bits)
    if copies:
        made.keep_copies({n: machine.array(s, dtype) for n, s in shapes.items()})
    gradients = {n: machine.array(s, gradient) for n, s in shapes.items()}
    scaler = LossScaler()
    scaler.unscale(gradients)
    clip_gradients(gradients, 1.0)
    measured = measure_gradients(gradients, 1.0, scaler=scaler)
    made.step(gradients, finite=measured.finite, factor=measured.factor)
    scaler.update(measured.finite)


def bias_gradient(machine: Machine, dtype: Any, bias: Any) -> None:
    """Sum the gradient of a bias; linear itself multiplies by cuBLAS and has no kernel."""
    dy, x, weight = (machine.array(shape, dtype) for shape in ((64, 96), (64, 8), (96, 8)))
    linear_backward(dy, x, weight, machine.array(96, bias), wanted={"bias"})


def adapter_gradients(machine: Machine, dtype: Any, rank: int, shift: int, small: bool) -> None:
    """Pass over dy for an adapter; lora_linear itself multiplies by cuBLAS and has no kernel."""
    rows, outputs = (32, 64) if small else (4096, 4096)  # one block, or sums of several
    shapes = (rows, outputs), (rows, 8), (outputs, 8), (rank, 8), (outputs, rank), (rows, rank)
    dy, x, weight, a, b, low = (machine.array(shape, dtype, shift) for shape in shapes)
    lora_linear_backward(dy, None, x, weight, a, b, None, None, low, wanted={"b"})


def programs() -> Iterator[tuple[str, str, Callable[[Machine], None]]]:
    """Return what launches kernels and is not an op: its name, a form, and what does it."""
    for dtype in KERNEL_DTYPES:
        for bias in dict.fromkeys((dtype, np.dtype("float32"))):
            words = f"{dtype} bias {bias}"
            run = functools.partial(bias_gradient, dtype=dtype, bias=bias)
            yield "linear_backward", words, run
        for rank, shift, small in ((8, 0, 0), (16, 0, 1), (32, 0, 0), (64, 0, 0), (64, 1, 0)):
            words = f"{dtype} rank={rank}{' shift=1' * shift}{' one block' * small}"
            run = functools.partial(
                adapter_gradients, dtype=dtype, rank=rank, shift=shift, small=bool(small)
            )
            yield "lora_linear_backward", words, run
        narrow = dtype.itemsize == 2
        forms = [
            (dtype, bits, copies) for bits in (32, 8) for copies in (False, True)[: 1 + narrow]
        ]
        for gradient, bits, copies in [*forms, *[(np.dtype("float32"), 32, False)] * narrow]:
            words = f"{dtype} gradient {gradient} {bits} bits{' copies' * copies}"
            yield (
                "AdamW.step",
                words,
                functools.partial(
                    training_step, dtype=dtype, gradient=gradient, bits=bits, copies=copies
                ),
            )


def launches(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Return what calls of every form launch, with the name of what was called and the form."""
    yield from _launches(arch, forward_ops())
    for name, words, program in programs():
        with gpu(arch) as machine:
            machine.strict = False
            program(machine)
            yield from ((launch, name, words) for launch in machine.launches)
    if arch == "90":  # what is not taken without being asked for
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hopper, "asked", True)
            patch.setattr(_backward_hopper, "one_pass", False)
            asked = [*_launches(arch, ASKED), *_launches(arch, ASKED, dim=128, value_dim=128)]
            asked += [*broadcast_biases(arch), *windows(arch)]
            patch.setattr(_backward_hopper, "one_pass", True)
            asked += [*_launches(arch, ASKED), *_launches(arch, ASKED, dim=128, value_dim=128)]
            asked += in_turns(arch)
            yield from (each for each in asked if each[0].kernel.endswith("_sm90"))


def broadcast_biases(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Return what calls launch whose bias is one for all queries, or for all keys."""
    for queries, keys in ((1, 256), (256, 1)):
        with gpu(arch) as machine:
            q, bias = (
                machine.array((1, *n), BFLOAT16) for n in ((256, 4, 128), (4, queries, keys))
            )
            out, lse = attention_forward(q, q, q, bias=bias)
            attention_backward(out, q, q, q, out, lse, bias=bias)
            words = f"bias of {queries} x {keys}"
            yield from ((launch, "attention_backward", words) for launch in machine.launches)


def windows(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Return what calls launch that see neither far back nor ahead, beside what hides as well."""
    blocks = {"block_mask": (1, 4, 2, 2)}
    for dim, more, packed in itertools.product((64, 128, 256), ({}, blocks), (False, True)):
        with gpu(arch) as machine:
            given = {name: machine.array(size, "bool") for name, size in more.items()}
            _forward(machine, dim, dim, packed, window=(9, 9), **given)
            words = " ".join([f"window dim={dim}", *more, *["packed"] * packed])
            yield from ((launch, "attention_forward", words) for launch in machine.launches)


def in_turns(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Return what causal calls launch for the gradients of heads between 64 and 128 columns."""
    heads = (72, 72), (96, 96), (128, 64), (128, 96)
    for (dim, value_dim), packed in itertools.product(heads, (False, True)):
        with gpu(arch) as machine:
            arrays, limits, found = _forward(machine, dim, value_dim, packed, causal=True)
            machine.launches.clear()
            back = attention_varlen_backward if packed else attention_backward
            back(found[0], *arrays, *found, causal=True, **limits)
            words = " ".join([f"causal dim={dim} value_dim={value_dim}", *["packed"] * packed])
            yield from ((launch, "attention_backward", words) for launch in machine.launches)


def _forward(machine: Machine, dim: int, value_dim: int, packed: bool, **options: Any) -> Any:
    """Call attention; return its arrays, what else a packed call says, and what it returns."""
    batch = () if packed else (1,)
    q, v = (machine.array((*batch, 256, 4, n), BFLOAT16) for n in (dim, value_dim))
    if not packed:
        return (q, q, v), {}, attention_forward(q, q, v, **options)
    arrays = (q, q, v, *2 * (machine.array((2,), "int64"),))
    limits = {"max_queries": 256, "max_keys": 256}
    return arrays, limits, attention_varlen_forward(*arrays, **limits, **options)


def _launches(arch: str, names: Iterable[str], **also: Any) -> Iterator[tuple[Launch, str, str]]:
    for name in names:
        op = OPS[name]
        backward = op.backward if op.backward and op.backward.launch else None
        several = forms(op) if op.launch or backward else ()
        for form in (each._replace(sizes=each.sizes | also) for each in several):
            with gpu(arch) as machine:
                forward = call(op, form, machine)
                outputs = forward.run()
                yield from ((launch, name, str(form)) for launch in machine.launches)
                machine.launches.clear()
                if backward:
                    turned(forward, outputs, machine, form).launches()  # not the definition
                    by = backward.__name__
                    yield from ((launch, by, str(form)) for launch in machine.launches)


@functools.cache
def _sources() -> bytes:
    """Return what decides which variants there are: this library, its tests, what they run on."""
    root = Path(__file__).parent.parent
    names = ("unsloth_cupy/**/*.py", "tests/*.py", "tests/ops/*.py")
    paths = [path for name in names for path in sorted(root.glob(name))]
    paths += sorted(source_root().rglob("*.cu*"))
    told = [str(source_root()), sys.version, np.__version__, ml_dtypes.__version__]
    with contextlib.suppress(ImportError):
        import cupy

        told += [cupy.__version__, str(cupy.cuda.nvrtc.getVersion())]
    return "\0".join([*told, *(path.read_text() for path in paths)]).encode()


@functools.cache
def variants(arch: str) -> tuple[Variant, ...]:
    """Return the variants that an architecture is asked for, each once, in a fixed order.

    They are kept for other processes that find the same sources: a list takes two seconds.
    """

    def build(folder: Path) -> Path:
        path = folder / "list"
        path.write_bytes(pickle.dumps(_listed(arch)))
        return path

    path = kept_file(f"variants_{arch}", arch.encode() + _sources(), build, ".pickle")
    found: tuple[Variant, ...] = pickle.loads(path.read_bytes())
    return found


def _listed(arch: str) -> tuple[Variant, ...]:
    found: dict[Any, Variant] = {}
    labels: set[tuple[str, str]] = set()
    for launch, by, form in launches(arch):
        key = launch.kernel, launch.source, launch.threads, launch.shared
        if key in found:
            continue
        label = form if by == launch.kernel else f"{by} {form}"
        while (launch.kernel, label) in labels:  # a call asks for several parts of a kernel
            label += " again"
        labels.add((launch.kernel, label))
        found[key] = Variant(launch.kernel, label, arch, launch)
    return tuple(found.values())


@functools.cache
def of_kernel(kernel: str, arch: str) -> tuple[Variant, ...]:
    """Return the variants of one kernel."""
    return tuple(variant for variant in variants(arch) if variant.kernel == kernel)


def declared() -> list[str]:
    """Return the kernels of ``kernels_cu``."""
    sources = [path.read_text() for path in sorted(source_root().glob("*.cu"))]
    return re.findall(r"^(?:CLUSTER_)?KERNEL\([^)]*\)\s*(\w+)\(", "".join(sources), re.M)


def constants(source: str) -> dict[str, str]:
    """Return the constants of a translation unit."""
    values = re.findall(r"^constexpr \w+ (\w+) = (\w+);$", source, re.M)
    return dict(values + re.findall(r"^using (\w+) = (.+);$", source, re.M))
