"""List every variant of a kernel that the library launches, by calling all ops on a stand-in GPU.

A variant is the source for ``cupy.RawModule`` and the launch of its kernel.  Calls cover every row
of the launch tables, every option, each optional array alone and all together, every dtype, and
misaligned arrays; a variant that several calls launch is listed once.
"""

import contextlib
import functools
import inspect
import itertools
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    Lion,
    LossScaler,
    Mxfp4,
    ScheduleFreeAdamW,
    attention_backward,
    attention_forward,
    attention_varlen_backward,
    attention_varlen_forward,
    clip_gradients,
    gated_rms_norm_backward,
    grouped_linear,
    layer_norm_backward,
    linear,
    linear_backward,
    measure_gradients,
    rms_norm_backward,
)
from unsloth_cupy.bench.cases import Call, Scale, forward_ops, sizes
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES, allowed
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.signature import Operand, shape_of
from unsloth_cupy.core.source import source_root
from unsloth_cupy.ops.attention import _backward_hopper, _hopper
from unsloth_cupy.ops.elements.cast import concatenate
from unsloth_cupy.ops.linear.dropout import noise
from unsloth_cupy.ops.linear.lora import lora_linear_backward, lora_linear_forward
from unsloth_cupy.ops.linear.lora_group import lora_group, lora_group_backward
from unsloth_cupy.ops.quantized.blocks import Q40, Q80, Blocks

from ...harness.parity import general_attention, proofs
from ...harness.sampling import Sample
from ...harness.tracked import tracked
from ...machines.cuda_on_cpu.build import kept_file
from ...machines.stand_in import LIMITS, Launch, Machine, gpu

ARCHITECTURES = tuple(LIMITS)
SCALE = Scale(tokens=256, hidden=256, inner=512, vocab=512, heads=32, kv_heads=8, dim=128)

# Row lengths: one for every line of the launch tables, with and without a remainder, and odd ones,
# for which an access has a single value.
ROWS = (7, 128, 4104, 16384, 131072, 131073)
VECTORS = ({"axes": (4, 4096)}, {"axes": (4, 4096), "shift": 1})  # accesses of 16 bytes, one value
SLICE = {"axes": (4, 4096), "gap": 8}
ON_WARPGROUPS = "attention_forward", "attention_varlen_forward"  # ops with kernels on warpgroups


def declared_by(op: str, what: str) -> Any:
    """Return the ``sizes``, ``options`` or ``apart`` that a Parity class of an op declares."""
    declarations = (vars(each)[what] for each in proofs() if each.op == op and what in vars(each))
    return next(declarations, None)


class Form(NamedTuple):
    """A form of a call: sizes of axes, names of optional arrays to pass, dtypes, options."""

    sizes: dict[str, Any]
    given: tuple[str, ...]
    dtype: np.dtype[Any]
    wide: bool  # float32 for arrays that may have it beside 16-bit arrays; int32 for indices
    options: dict[str, Any]

    def __str__(self) -> str:
        """Return a label that differs between forms."""
        words = [self.dtype.name, *(f"{n}={_short(v)}" for n, v in self.sizes.items())]
        words += [*(f"{n}={_short(v)}" for n, v in self.options.items()), *self.given]
        return " ".join([*words, *["wide"] * self.wide])


class Variant(NamedTuple):
    """A kernel as one call on one architecture launches it."""

    kernel: str
    label: str
    arch: str
    launch: Launch

    def __str__(self) -> str:
        """Return a name for reports."""
        return f"sm_{self.arch} {self.kernel} {self.label}"


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def forms(op: Op[..., Any]) -> Iterator[Form]:
    """Yield the forms of the calls of a forward op."""
    name = op.__name__
    axes = {axis for operand in op.contract.inputs for axis in operand.axes}
    by_element = (*VECTORS, SLICE) if op.widen and op.strided else VECTORS
    flat = by_element if axes - {"1"} == {"*axes"} else ({},)
    parameters = inspect.signature(op.definition).parameters.values()
    flags = [parameter.name for parameter in parameters if parameter.default is False]
    either = tuple({flag: value} for flag in flags for value in (False, True)) or ({},)
    optional = [operand.name for operand in op.contract.inputs if operand.optional]
    shapes = declared_by(name, "sizes") or flat
    choices = declared_by(name, "options") or either
    together = [each for each in optional if each not in (declared_by(name, "apart") or ())]
    every = {key: value for options in choices for key, value in options.items()}
    middle = shapes[len(shapes) // 2]
    for dtype in KERNEL_DTYPES:
        # float16 has the size and the launch tables of bfloat16: one shape tests its arithmetic
        for size in shapes if dtype.name != "float16" else (middle,):
            yield Form(size, (), dtype, False, choices[0])
            others = {key: value for key, value in every.items() if key not in size}
            yield Form(size, (*together,), dtype, True, others)
    at = len(shapes) // 2
    for size in shapes[at : at + (2 if "queries" in middle else 1)]:  # few and many queries
        for options in choices[1:]:
            yield Form(size, (), BFLOAT16, False, options)
        for names in [(), (*optional,), *((each,) for each in optional)]:
            yield Form(size, names, BFLOAT16, not names, choices[0])


def call(op: Op[..., Any], form: Form, machine: Machine) -> Call:
    """Return a call of this form with arrays of zeros."""
    known = {**sizes(SCALE), "tokens": 4, "rows": (4,), **form.sizes}
    shift = form.sizes.get("shift", 0)

    def array_for(operand: Operand) -> Any:
        if operand.optional and operand.name not in form.given:
            return None
        choices = allowed(operand.kind, form.dtype)
        if operand.kind == "int":
            choices = choices[::-1]  # int64 is the default of indices
        dtype = choices[-1] if form.wide else choices[0]
        shape = shape_of(operand, known) or ()
        if shape and (gap := form.sizes.get("gap", 0)):  # a slice of a wider array
            return machine.array((*shape[:-1], shape[-1] + gap), dtype)[..., : shape[-1]]
        return machine.array(shape, dtype, shift)

    arrays = {operand.name: array_for(operand) for operand in op.contract.inputs}
    options = {name: known[name] for name in op.options & known.keys()}
    return Call(op, arrays, options | form.options)


def backward_call(forward: Call, outputs: dict[str, Any], machine: Machine, form: Form) -> Call:
    """Return the call of the backward op; gradients that are optional are passed if wide."""
    op: Any = forward.op.backward
    shift = form.sizes.get("shift", 0)
    seeds = {
        f"d{name}": machine.array(array.shape, array.dtype, shift)
        for name, array in outputs.items()
        if any(o.name == f"d{name}" and (form.wide or not o.optional) for o in op.contract.inputs)
    }
    return forward.backward(outputs, seeds)


def training_step(machine: Machine, dtype: Any, gradient: Any, bits: int, copies: bool) -> None:
    """Make an optimizer step without a host read; not an op, as it takes all tensors at once."""
    master = np.dtype("float32") if copies else dtype
    shapes = {"even": (8192,), "odd": (4100,)}
    optimizer = AdamW({n: machine.array(s, master) for n, s in shapes.items()}, state_bits=bits)
    if copies:
        optimizer.keep_copies({n: machine.array(s, dtype) for n, s in shapes.items()})
    gradients = {n: machine.array(s, gradient) for n, s in shapes.items()}
    scaler = LossScaler()
    scaler.unscale(gradients)
    clip_gradients(gradients, 1.0)
    measured = measure_gradients(gradients, 1.0, scaler=scaler)
    optimizer.step(gradients, finite=measured.finite, factor=measured.factor)
    scaler.update(measured.finite)


def other_step(machine: Machine, kind: Any, dtype: Any, gradient: Any, copies: bool) -> None:
    """Make a step of another optimizer than AdamW."""
    master = np.dtype("float32") if copies else dtype
    optimizer = kind({"odd": machine.array((4100,), master)})
    if copies:
        optimizer.keep_copies({"odd": machine.array((4100,), dtype)})
    finite, factor = machine.array((), np.bool_), machine.array((), np.float32)
    optimizer.step({"odd": machine.array((4100,), gradient)}, finite=finite, factor=factor)


def bias_gradient(machine: Machine, dtype: Any, bias: Any) -> None:
    """Compute the gradient of a bias; linear itself calls cuBLAS and has no kernel."""
    dy, x, weight = (machine.array(shape, dtype) for shape in ((64, 96), (64, 8), (96, 8)))
    linear_backward(dy, x, weight, machine.array(96, bias), wanted={"bias"})


def adapter_gradients(machine: Machine, dtype: Any, rank: int, shift: int, small: bool) -> None:
    """Compute the gradient of an adapter's b; lora_linear itself calls cuBLAS and has no kernel.

    The adapter is in float32, and in the dtype of x where that is off alignment.
    """
    own = dtype if shift else np.float32
    rows, outputs = (32, 64) if small else (4096, 4096)  # one block; sums over several blocks
    shapes = (rows, outputs), (rows, 8), (outputs, 8), (rank, 8), (outputs, rank), (rows, rank)
    kinds = dtype, dtype, dtype, own, own, dtype
    arrays = (machine.array(*each, shift) for each in zip(shapes, kinds, strict=True))
    dy, x, weight, a, b, low = arrays
    lora_linear_backward(dy, None, x, weight, a, b, None, None, low, wanted={"b"})


def adapters_of_one_x(machine: Machine, dtype: Any, rank: int, shift: int) -> None:
    """Compute results and gradients of two adapted layers, and of one with dropout.

    The adapters are in float32, and in the dtype of x where that is off alignment.
    """
    own = dtype if shift else np.float32
    x, weight, a, b = (
        machine.array(shape, kind, shift)
        for shape, kind in (
            *(((64, 256), dtype), ((512, 256), dtype)),
            *(((rank, 256), own), ((512, rank), own)),
        )
    )
    *ys, low = lora_group(x, weight, weight, None, a, a, None, b, b)
    arrays = (weight, weight, None, a, a, None, b, b, None)
    lora_group_backward(*ys, None, x, *arrays, low, wanted={"x"})
    key = machine.array((), "int64") if shift else None
    lora_linear_forward(x, weight, a, b, key=key, dropout=0.5, seed=None if shift else 3)


def rows_beside_and_noise(machine: Machine, dtype: Any, shift: int) -> None:
    """Copy columns of three arrays side by side, and draw noise for rows of one size or of own."""
    parts = [machine.array((16, 256), dtype, shift) for _ in range(3)]
    concatenate(parts, machine.array((16, 768), dtype, shift))
    key, sizes = machine.array((), "int64"), machine.array((8,), "float32")
    noise(machine.array((2, 8, 257 if shift else 256), dtype), 0.1, key, sizes)


def in_blocks(machine: Machine, kind: type[Blocks], dtype: Any, rows: int) -> None:
    """Multiply by a weight in blocks: by its codes if rows are few, by the dense stack if none."""
    shape = (2, 64) if rows == 0 else (2048,)
    packed = machine.array((*shape, 256 // kind.VALUES), kind.CODES)
    scales = machine.array((*shape, 8), kind.SCALES)
    weight = kind(packed, scales, dtype=dtype)
    x = machine.array((rows or 4, 256), dtype)
    if rows:
        linear(x, weight)
    else:
        grouped_linear(x, weight, machine.array((3,), "int32"))


def frozen_norms(machine: Machine, dtype: Any, hidden: int) -> None:
    """Compute the gradients of rows alone: with that of h, with a mean, with a gate."""
    x, weight = machine.array((4, hidden), dtype), machine.array(hidden, dtype)
    rstd, own = machine.array((4,), "float32"), {"wanted": frozenset({"x"})}
    rms_norm_backward(x, x, x, weight, None, None, rstd, **own)
    layer_norm_backward(x, None, x, weight, None, None, rstd, rstd, **own)
    gated_rms_norm_backward(x, x, x, weight, rstd, **own)


def programs() -> Iterator[tuple[str, str, Callable[[Machine], None]]]:
    """Yield functions that launch kernels and are not ops: a name, a label, the function."""
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
        for rank, shift in ((8, 0), (64, 0), (96, 0), (8, 1)):
            words = f"{dtype} rank={rank}{' shift=1' * shift}"
            run = functools.partial(adapters_of_one_x, dtype=dtype, rank=rank, shift=shift)
            yield "lora_group", words, run
        for shift in (0, 1):
            run = functools.partial(rows_beside_and_noise, dtype=dtype, shift=shift)
            yield "rows", f"{dtype}{' shift=1' * shift}", run
        for kind, rows in itertools.product((Mxfp4, Q40, Q80), (0, 4, 8, 16, 17)):
            run = functools.partial(in_blocks, kind=kind, dtype=dtype, rows=rows)
            yield "linear", f"{dtype} {kind.KIND} rows={rows}", run
        for hidden in ROWS:
            run = functools.partial(frozen_norms, dtype=dtype, hidden=hidden)
            yield "frozen norms", f"{dtype} hidden={hidden}", run
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
        wide = np.dtype("float32")
        every = [(dtype, False), *[(wide, False), (dtype, True), (wide, True)] * narrow]
        for (gradient, copies), kind in itertools.product(every, (Lion, ScheduleFreeAdamW)):
            words = f"{dtype} gradient {gradient}{' copies' * copies}"
            run = functools.partial(
                other_step, kind=kind, dtype=dtype, gradient=gradient, copies=copies
            )
            yield f"{kind.__name__}.step", words, run


def launches(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Yield the launches of calls of every form, with the name of the callee and the form."""
    with general_attention():
        yield from _launches(arch, forward_ops())
    for name, words, program in programs():
        with gpu(arch) as machine:
            machine.strict = False
            program(machine)
            yield from ((launch, name, words) for launch in machine.launches)
    if arch == "90":  # kernels on warpgroups
        square = {"dim": 128, "value_dim": 128}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hopper, "requested", True)
            patch.setattr(_backward_hopper, "one_pass", False)
            requested = [*_launches(arch, ON_WARPGROUPS), *_launches(arch, ON_WARPGROUPS, **square)]
            requested += [*broadcast_biases(arch), *windows(arch)]
            patch.setattr(_backward_hopper, "one_pass", True)
            requested += [
                *_launches(arch, ON_WARPGROUPS),
                *_launches(arch, ON_WARPGROUPS, **square),
            ]
            requested += in_turns(arch)
            yield from (each for each in requested if each[0].kernel.endswith("_sm90"))


def broadcast_biases(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Yield the launches of calls whose bias is broadcast over queries, or over keys."""
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
    """Yield the launches of calls with a window on both sides, with and without a block mask."""
    blocks = {"block_mask": (1, 4, 2, 2)}
    for dim, more, packed in itertools.product((64, 128, 256), ({}, blocks), (False, True)):
        with gpu(arch) as machine:
            masks = {name: machine.array(size, "bool") for name, size in more.items()}
            _forward(machine, dim, dim, packed, window=(9, 9), **masks)
            words = " ".join([f"window dim={dim}", *more, *["packed"] * packed])
            yield from ((launch, "attention_forward", words) for launch in machine.launches)


def in_turns(arch: str) -> Iterator[tuple[Launch, str, str]]:
    """Yield the launches for gradients of causal calls with heads of 64 to 128 columns."""
    heads = (72, 72), (96, 96), (128, 64), (128, 96)
    for (dim, value_dim), packed in itertools.product(heads, (False, True)):
        with gpu(arch) as machine:
            arrays, limits, outputs = _forward(machine, dim, value_dim, packed, causal=True)
            machine.launches.clear()
            back = attention_varlen_backward if packed else attention_backward
            back(outputs[0], *arrays, *outputs, causal=True, **limits)
            words = " ".join([f"causal dim={dim} value_dim={value_dim}", *["packed"] * packed])
            yield from ((launch, "attention_backward", words) for launch in machine.launches)


def _forward(machine: Machine, dim: int, value_dim: int, packed: bool, **options: Any) -> Any:
    """Call attention; return its arrays, the limits of a packed call, and the outputs."""
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
        with_kernels = forms(op) if op.launch or backward else ()
        with gpu(arch) as machine:
            for form in (each._replace(sizes=each.sizes | also) for each in with_kernels):
                machine.launches.clear()
                forward = call(op, form, machine)
                outputs = forward.run()
                yield from ((launch, name, str(form)) for launch in machine.launches)
                machine.launches.clear()
                if backward:
                    # .launches(), as the definition of the backward op would launch nothing
                    backward_call(forward, outputs, machine, form).launches()
                    by = backward.__name__
                    yield from ((launch, by, str(form)) for launch in machine.launches)


@functools.cache
def _sources() -> bytes:
    """Return everything that determines the list: the library, its tests, versions of packages."""
    rooms = (f"tests/{room}/*.py" for room in ("code", "harness", "machines", "ops"))
    paths = [path for names in ("unsloth_cupy/**/*.py", *rooms) for path in tracked(names)]
    paths += sorted(source_root().rglob("*.cu*"))
    parts = [str(source_root()), sys.version, np.__version__, ml_dtypes.__version__]
    with contextlib.suppress(ImportError):
        import cupy

        parts.append(cupy.__version__)
    return b"\0".join(["\0".join(parts).encode(), *(path.read_bytes() for path in paths)])


@functools.cache
def variants(arch: str) -> tuple[Variant, ...]:
    """Return the distinct variants for an architecture, in a fixed order.

    The list takes two seconds to build; it is cached on disk for processes with the same sources.
    """

    def build(folder: Path) -> Path:
        path = folder / "list"
        path.write_bytes(pickle.dumps(_listed(arch)))
        return path

    path = kept_file(f"variants_{arch}", arch.encode() + _sources(), build, ".pickle")
    cached: tuple[Variant, ...] = pickle.loads(path.read_bytes())
    return cached


def _listed(arch: str) -> tuple[Variant, ...]:
    distinct: dict[Any, Variant] = {}
    labels: set[tuple[str, str]] = set()
    for launch, by, form in launches(arch):
        key = launch.kernel, launch.source, launch.threads, launch.shared
        if key in distinct:
            continue
        label = form if by == launch.kernel else f"{by} {form}"
        while (launch.kernel, label) in labels:  # one call may launch several variants of a kernel
            label += " again"
        labels.add((launch.kernel, label))
        distinct[key] = Variant(launch.kernel, label, arch, launch)
    return tuple(distinct.values())


@functools.cache
def of_kernel(kernel: str, arch: str) -> tuple[Variant, ...]:
    """Return the variants of one kernel."""
    return tuple(variant for variant in variants(arch) if variant.kernel == kernel)


def architectures(kernel: str) -> tuple[str, ...]:
    """Return the architectures that a kernel is made for."""
    return ("90",) if kernel.endswith("_sm90") else ARCHITECTURES


def of_today(kernel: str, arch: str, day: int = Sample.day) -> Sequence[Variant]:
    """Return one variant of a kernel, another one when it is the architecture's turn; or all."""
    several = of_kernel(kernel, arch)
    at = day // len(architectures(kernel)) + ARCHITECTURES.index(arch) * 7
    return several if Sample.all else [several[at % len(several)]]


def declared() -> list[str]:
    """Return the names of the kernels of ``kernels_cu``."""
    sources = [path.read_text() for path in tracked("kernels_cu/*.cu")]
    return re.findall(r"^(?:CLUSTER_)?KERNEL\([^)]*\)\s*(\w+)\(", "".join(sources), re.M)


def constants(source: str) -> dict[str, str]:
    """Return the constants of a translation unit by name, as text."""
    values = re.findall(r"^constexpr \w+ (\w+) = (\w+);$", source, re.M)
    return dict(values + re.findall(r"^using (\w+) = (.+);$", source, re.M))
