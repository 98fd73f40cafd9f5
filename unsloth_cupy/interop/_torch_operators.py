"""Registers ops as operators of torch, ``torch.ops.unsloth_cupy.NAME``, for tracers and compilers.

An operator has a schema, a fake (abstract) implementation, a gradient, and rules for autocast and
vmap, all derived from the op.  Its arguments are the arrays of the op (None for absent arrays), the
seed of dropout, and the options.  An output that the op does not return is a tensor of size 0.  As
torch requires, results share no memory with arguments or with each other: an output that is the
same array as another one is a tensor of size 0, too.
"""

import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch
from torch._functorch.utils import enable_single_level_autograd_function as single_level
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from ..core.op import Op
from ..core.replay import choices, choosing
from ..errors import ConfigError, DTypeError, GradientError
from ._torch_autocast import autocast
from ._torch_memory import DTYPES, TORCH
from ._torch_schema import codec_of
from ._wiring import (
    SEED,
    Form,
    forms,
    gradient_names,
    may_be_number,
    needed,
    no_gradient,
    shared_outputs,
    table_gradient,
)

SPACE = "unsloth_cupy"
C: Any = torch._C
LIBRARY: Any = torch.library.Library(SPACE, "DEF")
DEVICES, PACKED = ("cpu", "cuda"), torch.contiguous_format
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # arguments may have any strides
Compute = Callable[..., tuple[Any, ...]]  # (arrays and options in the order of the definition)
functorch = C._are_functorch_transforms_active
compiling = torch.compiler.is_compiling


class Operator:
    """An op registered with torch's dispatcher; ``backward`` is the operator of its backward op."""

    def __init__(self, op: Op[..., Any], compute: Compute, backward: "Operator | None") -> None:
        self.op, self.compute, self.backward = op, compute, backward
        name = op.__name__
        while hasattr(getattr(torch.ops, SPACE), name):  # a user's op has this name, too
            name += "_"
        self.name = name
        inputs, parameters = op.contract.inputs, inspect.signature(op.definition).parameters
        self.results = [operand.name for operand in op.contract.outputs]
        self.order = [*parameters]
        self.tensors = [*op.names, *([SEED] if SEED in op.options else [])]
        self.numbers = {o.name for o in inputs if may_be_number(o)} | {SEED} & op.options
        self.codecs = {
            option: codec_of(parameters[option])
            for option in self.order
            if option not in self.tensors
        }
        absent = {o.name for o in inputs if o.optional} | {SEED}
        schema = [f"Tensor{'?' * (tensor in absent)} {tensor}" for tensor in self.tensors]
        schema += [f"{codec.kind} {option}" for option, codec in self.codecs.items()]
        returns = ", ".join(["Tensor"] * len(self.results))
        LIBRARY.define(f"{name}({', '.join(schema)}) -> ({returns})", tags=TAGS)
        self.door = getattr(getattr(torch.ops, SPACE), name).default
        self.apply = self._recorded()
        LIBRARY.impl(name, self.run, "CompositeExplicitAutograd")
        LIBRARY.impl(name, self.differentiated, "Autograd")
        torch.library.register_fake(f"{SPACE}::{name}", self.abstract, lib=LIBRARY)
        torch.library.register_vmap(f"{SPACE}::{name}", _by_slice(self.door), lib=LIBRARY)
        if op.backward is not None:
            for device in DEVICES:
                rule = functools.partial(self._autocast, device)
                LIBRARY.impl(name, rule, f"Autocast{device.upper()}")

    def split(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the present tensors by name, and the decoded options."""
        count, options = len(self.tensors), {}
        tensors = zip(self.tensors, arguments[:count], strict=True)
        for (name, codec), value in zip(self.codecs.items(), arguments[count:], strict=True):
            options[name] = value if codec.decode is None else codec.decode(value)
        return {name: tensor for name, tensor in tensors if tensor is not None}, options

    def run(self, *arguments: Any) -> Any:
        """Run the op on the memory of tensors."""
        tensors, options = self.split(arguments)
        for name in self.numbers & tensors.keys():
            if name == SEED:
                tensors[name] = seed_of(tensors[name])
            elif tensors[name].dim() == 0 and not tensors[name].is_cuda:
                tensors[name] = int(tensors[name])
        like = arguments[self.lead]
        values = tensors | options
        outputs = self.compute(*[values.get(name) for name in self.order])
        results, used = [], {_address(tensor) for tensor in tensors.values()}
        for tensor in _packed(outputs):
            if tensor is None:
                results.append(like.new_empty(0))
                continue
            own = _address(tensor) not in used
            results.append(tensor.contiguous() if own else tensor.clone(memory_format=PACKED))
            used.add(_address(results[-1]))
        return _unpacked(results)

    @functools.cached_property
    def lead(self) -> int:
        """Return the index of the first required tensor."""
        return next(i for i, o in enumerate(self.op.contract.inputs) if not o.optional)

    def abstract(self, *arguments: Any) -> Any:
        """Return fake tensors of the outputs, whose sizes may be symbols."""
        tensors, options = self.split(arguments)
        inputs = {
            n: Form(tuple(t.shape), dtype_of(self.op, n, t))
            for n, t in tensors.items()
            if n != SEED
        }
        like = arguments[self.lead]
        if SEED in self.op.options:
            options[SEED] = 0 if SEED in tensors else None  # 0 stands for the unknown value
        outputs = forms(self.op, inputs, options).values()
        filled = [form or Form((0,), DTYPES[like.dtype]) for form in outputs]
        return _unpacked([like.new_empty(shape, dtype=TORCH[dtype]) for shape, dtype in filled])

    def differentiated(self, *arguments: Any) -> Any:
        """Run the call; record it for autograd if a gradient is required."""
        if forward_ad._current_level >= 0:
            self.refuse_tangents(arguments)
        records = torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in arguments
        )
        if records and "constant" not in self.op.facts:
            with single_level():
                return self.apply(*arguments)
        return self._below(*arguments)

    def _below(self, *arguments: Any) -> Any:
        """Call the operator below autograd in the dispatcher."""
        with C._AutoDispatchBelowAutograd():
            return self.door(*arguments)

    def refuse_tangents(self, arguments: Sequence[Any]) -> None:
        """Raise if a tensor has a tangent, for forward-mode differentiation."""
        unpack: Any = forward_ad.unpack_dual
        for each in arguments:
            if isinstance(each, torch.Tensor) and unpack(each).tangent is not None:
                cure = "take the gradient in backward mode: torch.func.vjp or grad, or .backward()"
                raise GradientError(f"{self.op.called} has no forward-mode derivative; {cure}")

    def _recorded(self) -> Any:
        """Return a function that calls the op and records its gradient."""

        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch.enable_grad(), _set_fwd_grad_enabled(True):  # for outer functorch levels
                outputs = self._below(*arguments)
            self.keep(ctx, arguments, outputs)
            return outputs

        body = {"forward": staticmethod(forward), "backward": staticmethod(self.back)}
        function: Any = type(self.name, (torch.autograd.Function,), body)
        return super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Save the tensors that the backward op needs, and no others."""
        tensors, ctx.options = self.split(inputs)
        outputs = dict(zip(self.results, _packed(output), strict=True))
        ctx.mark_non_differentiable(*[outputs[name] for name in self._idle(tensors)])
        ctx.set_materialize_grads(False)
        ctx.choices = choices.get()
        ctx.forms = [(a.shape, a.dtype, a.device) for a in outputs.values()]
        elsewhere = shared_outputs(self.op, tensors)
        values = (
            tensors | outputs | {n: tensors[of] for n, of in elsewhere.items() if of in tensors}
        )
        ctx.kept = (
            [] if self.backward is None else [n for n in self.backward.tensors if n in values]
        )
        ctx.save_for_backward(*[values[name] for name in ctx.kept])

    def _idle(self, tensors: Container[str]) -> list[str]:
        """Return the outputs without a gradient in a call with these tensors."""
        differentiable, elsewhere = {*gradient_names(self.op)}, shared_outputs(self.op, tensors)
        if self.op.backward is None:  # all outputs: the backward pass raises an error
            return self.results if "constant" in self.op.facts else []
        return [
            o.name
            for o in self.op.contract.outputs
            if o.name not in differentiable
            or o.name in elsewhere
            or any(operand not in tensors for operand in needed(self.op, o))
        ]

    def back(self, ctx: Any, *grads: Any) -> Any:
        """Call the backward op.

        The upstream gradient of an unused output is None, or zeros if the backward op requires it.
        """
        nothing = [None] * (len(self.tensors) + len(self.codecs))
        if all(grad is None for grad in grads):
            return tuple(nothing)
        if self.backward is None:
            raise no_gradient(self.op)
        values = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        required = {o.name for o in self.backward.op.contract.inputs if not o.optional}
        for name, grad, (shape, dtype, device) in zip(self.results, grads, ctx.forms, strict=True):
            zeros = grad is None and f"d{name}" in required
            values[f"d{name}"] = torch.zeros(shape, dtype=dtype, device=device) if zeros else grad
        needs = dict(zip(self.tensors, ctx.needs_input_grad, strict=False))
        for operand in self.op.contract.inputs:
            if operand.kind == "table" and needs[operand.name]:
                raise table_gradient(self.op, operand.name, "detach it")
        options = ctx.options | {"wanted": {name for name, need in needs.items() if need}}
        encoded = [
            options[name] if codec.encode is None else codec.encode(options[name])
            for name, codec in self.backward.codecs.items()
        ]
        tensors = [values.get(name) for name in self.backward.tensors]
        gradients = choosing(ctx.choices, self.backward.door, *tensors, *encoded)
        named = dict(zip(self.backward.results, _packed(gradients), strict=True))
        named |= {n: named[of] for n, of in shared_outputs(self.backward.op, values).items()}
        back = [named.get(f"d{name}") if needs[name] else None for name in self.tensors]
        return *back, *nothing[len(back) :]

    def _autocast(self, device: str, *arguments: Any) -> Any:
        """Call the operator with its tensors cast by autocast."""
        count, keys = len(self.op.names), C.DispatchKey
        tensors = autocast(self.op, arguments[:count], device)
        key = C.DispatchKeySet(getattr(keys, f"Autocast{device.upper()}"))
        with C._ExcludeDispatchKeyGuard(key):
            return self.door(*tensors, *arguments[count:])


def dtype_of(op: Op[..., Any], name: str, tensor: Any) -> Any:
    """Return the NumPy dtype of an operand; raise for a dtype without one, such as float8."""
    if tensor.dtype in DTYPES:
        return DTYPES[tensor.dtype]
    cure = "pass values: x.to(torch.bfloat16), times its scale where it has one"
    raise DTypeError(f"{op.called}: {name} is {tensor.dtype}, which no op reads; {cure}")


def seed_of(seed: Any) -> Any:
    """Return a seed; a tensor becomes a Python integer in 0 .. 2**64 - 1."""
    if not isinstance(seed, torch.Tensor):
        return seed
    if seed.dim() or seed.is_floating_point() or seed.is_complex():
        form = f"{tuple(seed.shape)} {seed.dtype}"
        raise ConfigError(f"seed is a tensor of {form}; pass integers of shape ()")
    return int(seed) % 2**64


def number(value: Any) -> Any:
    """Return a Python integer as a tensor, so that it is not a constant of a graph."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        raise ConfigError(f"{value!r} is not an integer; pass one, or a tensor of shape ()")
    signed: Any = value - 2**64 if value >= 2**63 else value  # the int64 with the same 64 bits
    return torch.full((), signed, dtype=torch.int64)


def _address(tensor: Any) -> Any:
    """Return the address of a tensor's storage; None for other objects."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else None


def _unpacked(tensors: Sequence[Any]) -> Any:
    """Return a single result as it is, several results as a tuple."""
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _packed(results: Any) -> Sequence[Any]:
    """Return the results of a call as a sequence, also a single result."""
    return results if isinstance(results, tuple | list) else (results,)


def _by_slice(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule for vmap that calls the operator once for each slice."""

    def mapped(info: Any, dims: Sequence[Any], *arguments: Any) -> Any:
        rows = []
        for i in range(info.batch_size):
            slices = [
                each.select(dim, i) if isinstance(each, torch.Tensor) and dim is not None else each
                for each, dim in zip(arguments, dims, strict=True)
            ]
            rows.append(_packed(call(*slices)))
        stacked = [torch.stack(column) for column in zip(*rows, strict=True)]
        return _unpacked(stacked), _unpacked([0] * len(stacked))

    return mapped
