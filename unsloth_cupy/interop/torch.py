"""Runs ops in torch, with gradients: eager, compiled, exported and transformed.

    from unsloth_cupy import rms_norm            accepts tensors that require gradients
    y = rms_norm(x, weight)                      y.grad_fn runs the library's backward op

This module has the library's functions under the same names.  An eager call runs the op on the
memory of its tensors, inside a ``torch.autograd.Function`` if a gradient is required; other calls
run an operator in ``torch.ops``.  The functions are generated once for each op.  In short:

    def swiglu(gate, up):
        if compiling() or functorch() or modes() or gate.__class__ not in plain ...:
            return traced(gate, up)              torch.ops.unsloth_cupy.swiglu: _torch_operators
        if autocast():
            gate, up = cast((gate, up), gate.device.type)
        if grad_enabled() and (gate.requires_grad or up.requires_grad):
            return apply(gate, up)
        return compute(gate, up)
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from ..core.call import write
from ..core.dtypes import Stored
from ..core.op import Op, Traced
from ..core.replay import choices, choosing
from ..errors import DTypeError, FrameworkError
from . import _torch_memory as memory
from ._torch_autocast import autocast
from ._torch_operators import (
    C,
    Operator,
    compiling,
    dtype_of,
    functorch,
    number,
    seed_of,
)
from ._torch_written import call_source, compute_source, function_source, traced_source
from ._wiring import (
    check_places,
    is_weight,
    may_be_number,
    module_names,
    no_gradient,
    operators,
    quantized,
    table_gradient,
    writes_in_place,
)

REFUSED = (TypeError, RuntimeError, BufferError)
dynamo = C._dynamo.eval_frame
F = TypeVar("F", bound=Callable[..., Any])
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
NONE = type(None)
PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
NO_GRAPH = (
    "a quantized weight cannot be in a graph of torch.compile(fullgraph=True), torch.export,"
    " torch.func or torch.jit: call the op outside of them, or pass the tensor of"
    " weight.dequantize()"
)
SCOPE: dict[str, Any] = {
    "forward_ad": forward_ad,
    "compiling": compiling,
    "functorch": functorch,
    "recording": C._is_tracing,  # torch.jit.trace
    "modes": C._len_torch_dispatch_stack,
    "autocast": C._is_any_autocast_enabled,
    "grad_enabled": torch.is_grad_enabled,
    "plain": PLAIN,
    "or_none": PLAIN | {NONE},
    "or_number": PLAIN | {NONE, int},
    "array_of": memory.array_of,
    "tensor_of": memory.tensor_of,
    "stream": memory.stream,
    "number": number,
    "seed_of": seed_of,
    "table_gradient": table_gradient,
    "zeros": lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    "choices": choices.get,
    "choosing": choosing,
    "Traced": Traced,
    "Stored": Stored,
    "FrameworkError": FrameworkError,
    "REFUSED": REFUSED,
}
registered: dict[Op[..., Any], Operator] = {}
scopes: dict[Op[..., Any], dict[str, Any]] = {}  # the globals of an op's functions
__getattr__, __dir__ = module_names(globals())


def _untraced(function: F) -> F:
    """Exclude a function and all functions that it calls from tracing by dynamo."""
    code, skip = getattr(function, "__code__"), dynamo._FrameAction.SKIP  # noqa: B009 -- mypy
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))
    return function


def outside_of_graphs(function: Any) -> Any:
    """Make a function with quantized weights break dynamo's graph: dynamo runs it untraced."""
    _untraced(function)
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, NO_GRAPH
    return function


def run(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on tensors; the library's functions call this."""
    try:
        # an attribute, not a dict of all ops: dynamo would recompile graphs when the dict grows
        call = op.in_torch
    except AttributeError:
        call = _generate(op)
    return call(*arrays, *options.values())


@_untraced
def _generate(op: Any) -> Callable[..., Any]:
    """Generate the functions of an op for eager tensors; return the function to call."""
    order = [*inspect.signature(op.definition).parameters]
    scope = SCOPE | {
        "op": op,
        "check": functools.partial(_check, op),
        "cast": functools.partial(autocast, op, once=True),
        "traced": functools.partial(_registered, op),
        "check_together": functools.partial(_check_together, op),
    }
    if writes_in_place(op):
        scope["array_of"] = memory.adopt
    scope["refuse"] = functools.partial(_refuse, op, scope["array_of"])
    scopes[op] = scope
    _write("tensors", op, compute_source(op, order))
    _untraced(scope["compute"])
    if writes_in_place(op):
        op.in_torch = scope["compute"]
        op.in_torch._torchdynamo_disable = True  # breaks the graph: it cannot record changes
        return op.in_torch
    _write("call", op, call_source(op, order))
    if any(map(is_weight, op.contract.inputs)):
        scope["check_outside"] = functools.partial(_check_outside, op)
        _write("call outside of graphs", op, call_source(op, order, outside=True))
        outside_of_graphs(scope["outside"])
    op.in_torch = scope["call"]
    if op.backward is not None:
        backward = op.backward
        scope["backward_op"] = backward.in_torch if backward in scopes else _generate(backward)
        scope["wanted"] = functools.partial(_wanted, op.names)
        backward_order = [*inspect.signature(op.backward.definition).parameters]
        _write("gradient", op, function_source(op, order, op.backward, backward_order))
    else:
        scope["forward"] = lambda ctx, *arguments: scope["compute"](*arguments)
        scope["backward"] = functools.partial(_refuse_gradient, op, len(order))
    body = {each: staticmethod(scope[each]) for each in ("forward", "backward")}
    function: Any = type(op.__name__, (torch.autograd.Function,), body)
    # apply of the base class skips functorch's checks, as call() excludes functorch
    scope["apply"] = super(torch.autograd.Function, function).apply
    return op.in_torch


def _write(what: str, op: Op[..., Any], source: str) -> None:
    """Compile generated source in the scope of an op."""
    write(f"{what} of {op.__name__} in torch", source, scopes[op])


def _registered(op: Op[..., Any], *arguments: Any) -> Any:
    """Register an op as an operator of torch, then call it."""
    register(op)
    return scopes[op]["traced"](*arguments)


@_untraced
def register(op: Op[..., Any]) -> Operator:
    """Register an op and its backward op as operators of torch, if they are not registered yet."""
    if op in registered:
        return registered[op]
    backward = None if op.backward is None else register(op.backward)
    operator = registered[op] = Operator(op, scopes[op]["compute"], backward)
    scopes[op]["door"] = operator.door
    scopes[op].update((f"encode_{n}", c.encode) for n, c in operator.codecs.items() if c.encode)
    _write("graph", op, traced_source(operator))
    return operator


def _wanted(names: Sequence[str], needs: Sequence[bool]) -> frozenset[str]:
    """Return the names of the operands that need a gradient."""
    return frozenset(name for name, need in zip(names, needs, strict=False) if need)


def _refuse_gradient(op: Op[..., Any], count: int, ctx: Any, *grads: Any) -> Any:
    """Run the backward pass of an op without a backward op: raise if an output has a gradient."""
    if any(grad is not None for grad in grads):
        raise no_gradient(op)
    return (None,) * count


def _check(op: Op[..., Any], tensors: Sequence[Any]) -> None:
    """Raise if an argument is not a tensor."""
    for operand, tensor in zip(op.contract.inputs, tensors, strict=True):
        call = f"{op.called}: {operand.name} is"
        if tensor is None and not operand.optional:
            raise DTypeError(f"{call} missing; pass {operand}")
        if tensor is None or isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, Stored):
            if is_weight(operand):
                continue
            raise quantized(op, operand)
        if type(tensor) is not int:
            op.library_of(tensors)
        if not may_be_number(operand):
            raise DTypeError(f"{call} not a tensor but {type(tensor).__name__}; pass a tensor")


def _check_outside(op: Op[..., Any], tensors: Sequence[Any]) -> None:
    """Raise for a call with a quantized weight inside a graph or a transform."""
    _check(op, tensors)
    dense = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if forward_ad._current_level >= 0:
        register(op).refuse_tangents(dense)
    subclass = any(type(t).__torch_dispatch__ is not PLAIN_DISPATCH for t in dense)
    if subclass or functorch() or SCOPE["recording"]():
        raise FrameworkError(f"{op.called}: {NO_GRAPH}")


def _check_together(op: Op[..., Any], tensors: Sequence[Any]) -> None:
    """Raise for arrays of several libraries or devices."""
    op.library_of(tensors)
    place = next(str(t.device) for t in tensors if isinstance(t, torch.Tensor))
    check_places(op, tensors, place)


def _refuse(op: Op[..., Any], adopt: Any, tensors: Sequence[Any], error: Exception) -> None:
    """Raise for a tensor whose memory neither NumPy nor CuPy can view."""
    op.library_of(tensors)
    for name, tensor in zip(op.names, tensors, strict=True):
        try:
            if isinstance(tensor, torch.Tensor):
                adopt(tensor)
        except REFUSED as problem:
            dtype_of(op, name, tensor)
            cure = ""
            if tensor.device.type not in ("cpu", "cuda"):
                cure = f"is on {tensor.device}, where no op runs; bring it to a CPU or a GPU: "
            raise FrameworkError(f"{op.called}: {name} {cure}{problem}") from error
    raise error


for _op in operators():
    if _op not in scopes:
        _generate(_op)
for _op in operators():
    register(_op)
