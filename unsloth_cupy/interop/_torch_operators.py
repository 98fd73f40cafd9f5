"""Ops as operators of torch, ``torch.ops.unsloth_cupy.NAME``: what tracers and compilers see.

An operator has a schema, an abstract twin, a gradient, rules for autocast and vmap, all read off
the op.  Its tensors are the op's arrays, absent ones None, and the seed of dropout; its options
follow.  What an op does not return is a tensor of size 0.  Results share no memory with arguments
nor with each other: an output that is another array is of size 0 too.
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
    same,
    table_gradient,
)

SPACE = "unsloth_cupy"
C: Any = torch._C
LIBRARY: Any = torch.library.Library(SPACE, "DEF")
DEVICES, PACKED = ("cpu", "cuda"), torch.contiguous_format
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # arrays may lie as they like
Compute = Callable[..., tuple[Any, ...]]  # of arrays and options in the order of the definition
functorch = C._are_functorch_transforms_active
compiling = torch.compiler.is_compiling


class Operator:
    """One op behind torch's dispatcher."""

    def __init__(self, op: Op[..., Any], compute: Compute, behind: "Operator | None") -> None:
        self.op, self.compute, self.behind = op, compute, behind  # the backward op's
        name = op.__name__
        while hasattr(getattr(torch.ops, SPACE), name):  # somebody's own op has it too
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

    def given(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors that are there, by name, and the options as the op has them."""
        count, options = len(self.tensors), {}
        tensors = zip(self.tensors, arguments[:count], strict=True)
        for (name, codec), value in zip(self.codecs.items(), arguments[count:], strict=True):
            options[name] = value if codec.decode is None else codec.decode(value)
        return {name: tensor for name, tensor in tensors if tensor is not None}, options

    def run(self, *arguments: Any) -> Any:
        """Run the op on the memory of tensors."""
        given, options = self.given(arguments)
        for name in self.numbers & given.keys():
            if name == SEED:
                given[name] = seed_of(given[name])
            elif given[name].dim() == 0 and not given[name].is_cuda:
                given[name] = int(given[name])
        like = arguments[self.lead]
        values = given | options
        found = self.compute(*[values.get(name) for name in self.order])
        made, seen = [], {_address(tensor) for tensor in given.values()}
        for tensor in _packed(found):
            if tensor is None:
                made.append(like.new_empty(0))
                continue
            own = _address(tensor) not in seen
            made.append(tensor.contiguous() if own else tensor.clone(memory_format=PACKED))
            seen.add(_address(made[-1]))
        return _unpacked(made)

    @functools.cached_property
    def lead(self) -> int:
        """Return the index of the first tensor that is never absent."""
        return next(i for i, o in enumerate(self.op.contract.inputs) if not o.optional)

    def abstract(self, *arguments: Any) -> Any:
        """Return tensors without elements, whose sizes may be symbols."""
        given, options = self.given(arguments)
        asked = {
            n: Form(tuple(t.shape), dtype_of(self.op, n, t)) for n, t in given.items() if n != SEED
        }
        like = arguments[self.lead]
        if SEED in self.op.options:
            options[SEED] = 0 if SEED in given else None  # any, as it is a tensor
        found = forms(self.op, asked, options).values()
        made = [form or Form((0,), DTYPES[like.dtype]) for form in found]
        return _unpacked([like.new_empty(shape, dtype=TORCH[dtype]) for shape, dtype in made])

    def differentiated(self, *arguments: Any) -> Any:
        """Run behind autograd: record the call where a gradient is asked for."""
        if forward_ad._current_level >= 0:
            self.refuse_tangents(arguments)
        asked = torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in arguments
        )
        if asked and "constant" not in self.op.facts:
            with single_level():
                return self.apply(*arguments)
        return self._below(*arguments)

    def _below(self, *arguments: Any) -> Any:
        with C._AutoDispatchBelowAutograd():
            return self.door(*arguments)

    def refuse_tangents(self, arguments: Sequence[Any]) -> None:
        """Raise for a tensor that has a tangent."""
        unpack: Any = forward_ad.unpack_dual
        for each in arguments:
            if isinstance(each, torch.Tensor) and unpack(each).tangent is not None:
                cure = "take the gradient in backward mode: torch.func.vjp or grad, or .backward()"
                raise GradientError(f"{self.op.called} has no forward-mode derivative; {cure}")

    def _recorded(self) -> Any:
        """Return what calls the op and records its gradient."""

        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch.enable_grad(), _set_fwd_grad_enabled(True):  # for other levels
                found = self._below(*arguments)
            self.keep(ctx, arguments, found)
            return found

        body = {"forward": staticmethod(forward), "backward": staticmethod(self.back)}
        made: Any = type(self.name, (torch.autograd.Function,), body)
        return super(torch.autograd.Function, made).apply  # type: ignore[misc]

    def keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what the backward op asks for, and no more."""
        given, ctx.options = self.given(inputs)
        found = dict(zip(self.results, _packed(output), strict=True))
        ctx.mark_non_differentiable(*[found[name] for name in self._idle(given)])
        ctx.set_materialize_grads(False)
        ctx.forms = [(a.shape, a.dtype, a.device) for a in found.values()]
        elsewhere = same(self.op, given)
        values = given | found | {n: given[of] for n, of in elsewhere.items() if of in given}
        ctx.kept = [] if self.behind is None else [n for n in self.behind.tensors if n in values]
        ctx.save_for_backward(*[values[name] for name in ctx.kept])

    def _idle(self, given: Container[str]) -> list[str]:
        """Return the outputs of a call that have no gradient."""
        taken, elsewhere = {*gradient_names(self.op)}, same(self.op, given)
        if self.op.backward is None:  # whoever asks meets an error
            return self.results if "constant" in self.op.facts else []
        return [
            o.name
            for o in self.op.contract.outputs
            if o.name not in taken
            or o.name in elsewhere
            or any(operand not in given for operand in needed(self.op, o))
        ]

    def back(self, ctx: Any, *grads: Any) -> Any:
        """Call the backward op: for an output that nobody used, with None or with zeros."""
        nothing = [None] * (len(self.tensors) + len(self.codecs))
        if all(grad is None for grad in grads):
            return tuple(nothing)
        if self.behind is None:
            raise no_gradient(self.op)
        values = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        must = {o.name for o in self.behind.op.contract.inputs if not o.optional}
        for name, grad, (shape, dtype, device) in zip(self.results, grads, ctx.forms, strict=True):
            zeros = grad is None and f"d{name}" in must
            values[f"d{name}"] = torch.zeros(shape, dtype=dtype, device=device) if zeros else grad
        needs = dict(zip(self.tensors, ctx.needs_input_grad, strict=False))
        for operand in self.op.contract.inputs:
            if operand.kind == "table" and needs[operand.name]:
                raise table_gradient(self.op, operand.name, "detach it")
        options = ctx.options | {"wanted": {name for name, need in needs.items() if need}}
        encoded = [
            options[name] if codec.encode is None else codec.encode(options[name])
            for name, codec in self.behind.codecs.items()
        ]
        found = self.behind.door(*[values.get(name) for name in self.behind.tensors], *encoded)
        named = dict(zip(self.behind.results, _packed(found), strict=True))
        named |= {n: named[of] for n, of in same(self.behind.op, values).items()}
        back = [named.get(f"d{name}") if needs[name] else None for name in self.tensors]
        return *back, *nothing[len(back) :]

    def _autocast(self, device: str, *arguments: Any) -> Any:
        count, keys = len(self.op.names), C.DispatchKey
        given = autocast(self.op, arguments[:count], device)
        key = C.DispatchKeySet(getattr(keys, f"Autocast{device.upper()}"))
        with C._ExcludeDispatchKeyGuard(key):
            return self.door(*given, *arguments[count:])


def dtype_of(op: Op[..., Any], name: str, tensor: Any) -> Any:
    """Return the dtype that NumPy has for an operand's; raise for others, such as float8."""
    if tensor.dtype in DTYPES:
        return DTYPES[tensor.dtype]
    cure = "pass values: x.to(torch.bfloat16), times its scale where it has one"
    raise DTypeError(f"{op.called}: {name} is {tensor.dtype}, which no op reads; {cure}")


def seed_of(seed: Any) -> Any:
    """Return a seed as a Python integer, in 0 .. 2**64 - 1 where it is a tensor."""
    if not isinstance(seed, torch.Tensor):
        return seed
    if seed.dim() or seed.is_floating_point() or seed.is_complex():
        given = f"{tuple(seed.shape)} {seed.dtype}"
        raise ConfigError(f"seed is a tensor of {given}; pass integers of shape ()")
    return int(seed) % 2**64


def number(value: Any) -> Any:
    """Return a Python integer as a tensor: in a graph it is not a constant."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer, torch.SymInt)):
        raise ConfigError(f"{value!r} is not an integer; pass one, or a tensor of shape ()")
    held: Any = value - 2**64 if value >= 2**63 else value  # 64 bits with a sign
    return torch.full((), held, dtype=torch.int64)


def _address(tensor: Any) -> Any:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else None


def _unpacked(tensors: Sequence[Any]) -> Any:
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _packed(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple | list) else (found,)


def _by_slice(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of vmap: one call a slice."""

    def mapped(info: Any, dims: Sequence[Any], *arguments: Any) -> Any:
        found = []
        for i in range(info.batch_size):
            slices = [
                each if dim is None else each.select(dim, i)
                for each, dim in zip(arguments, dims, strict=True)
            ]
            found.append(_packed(call(*slices)))
        made = [torch.stack(column) for column in zip(*found, strict=True)]
        return _unpacked(made), _unpacked([0] * len(made))

    return mapped
