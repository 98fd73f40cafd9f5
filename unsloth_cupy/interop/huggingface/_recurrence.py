"""Recurrences: modules whose forward calls a function that runs along tokens.

Such functions are recognized by their parameters: the gated delta rule (with a decay for each head
or channel), the scan of Mamba2 and the causal convolution before them.  A forward is copied with
other globals, in which the names of these functions are ops.  Ops also separate packed texts, for
which transformers needs other packages with kernels.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..torch import causal_conv, gated_delta_rule, ssd
from ._changes import Changes
from ._rotary import with_functions
from ._trials import Refused, draw, near

Function = Callable[..., Any]
Make = Callable[[Function], Function]
Notes = dict[Make, dict[str, Any]]  # arguments of a call, by the kind of function


def functions_of(module: nn.Module) -> dict[str, Function]:
    """Return the functions that a module's forward calls and that ops can compute, by name."""
    kind: Any = type(module)
    scope, names = _scope(kind)
    return {n: scope[n] for n in names if _kind(scope[n]) is not None}


@functools.cache
def _scope(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the globals of a forward, and the names of the functions that it reads."""
    forward: Any = inspect.unwrap(kind.forward)
    scope = getattr(forward, "__globals__", {})
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return scope, tuple(n for n in names if inspect.isfunction(scope.get(n)))


@functools.cache
def _kind(function: Function) -> Make | None:
    """Return the function that creates the replacement of a function; None if there is none."""
    names = {*inspect.signature(function).parameters} - {"kwargs"}
    return next((make for known, no, make in KINDS if known <= names and not no & names), None)


def record(changes: Changes, module: nn.Module) -> Notes:
    """Make a module record the last call of each kind of function; return the record."""
    notes: Notes = {}

    def noting(function: Function) -> Function:
        def noted(*args: Any, **options: Any) -> Any:
            make: Any = _kind(function)
            notes[make] = dict(inspect.signature(function).bind(*args, **options).arguments)
            return function(*args, **options)

        return noted

    own = {name: noting(function) for name, function in functions_of(module).items()}
    changes.forward(module, with_functions(type(module).forward, own))
    return notes


def take(changes: Changes, module: nn.Module, notes: Notes) -> None:
    """Make a module call ops; raise Refused if their results differ from its functions'."""
    functions = {}
    for name, function in functions_of(module).items():
        make: Any = _kind(function)
        if make in notes:
            _try(name, function, notes[make])
        if make in notes or make is _unfused:
            functions[name] = function
    if not notes:
        raise Refused("it did not call its functions")
    changes.forward(module, _computing(type(module).forward, tuple(functions.items())))


@functools.cache
def _computing(forward: Any, functions: tuple[tuple[str, Function], ...]) -> Function:
    """Return a forward that calls ops; all layers share it, so that it is compiled once."""
    replacements = {name: _made(function) for name, function in functions}
    return with_functions(forward, replacements)


@functools.cache
def _made(function: Function) -> Function:
    """Return the replacement of a function."""
    make: Any = _kind(function)
    wrapper: Function = functools.wraps(function)(make(function))
    return wrapper


def _try(name: str, function: Function, arguments: dict[str, Any]) -> None:
    """Raise Refused if an op differs for a recorded call, also with initial and final states."""
    names = inspect.signature(function).parameters
    calls = [{name: _wide(value) for name, value in arguments.items()}]
    for state in {"initial_state", "initial_states"} & {*names}:
        flags = {n: True for n in {"output_final_state", "return_final_states"} & {*names}}
        _, final = _call(function, calls[0] | flags)
        calls.append(calls[0] | flags | {state: draw(*final.shape, like=final)})
    for call in calls:
        if not near(_call(_made(function), call), _call(function, call), torch.float32):
            raise Refused(f"{name} has other results")


def _call(function: Function, arguments: dict[str, Any]) -> Any:
    """Call a function with arguments by name; "kwargs" has the arguments of ``**kwargs``."""
    rest = arguments.get("kwargs", {})
    return function(**{n: x for n, x in arguments.items() if n != "kwargs"}, **rest)


def _wide(value: Any) -> Any:
    """Return a float tensor detached and in float32, any other value as it is."""
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().float() if floats else value


# ---- replacements of functions -------------------------------------------------------------------
def _delta(function: Function) -> Function:
    """Return a gated delta rule with the parameters of transformers' functions."""

    def rule(
        query: Any, key: Any, value: Any, g: Any, beta: Any, chunk_size: int = 64,
        initial_state: Any = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        dtype, start = query.dtype, None if initial_state is None else initial_state.float()
        query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = _unit(query), _unit(key)
        out, final = gated_delta_rule(query, key, value, g, beta, initial=start, offsets=cu_seqlens)
        return out.to(dtype), final if output_final_state else None

    return rule


def _unit(x: Any) -> Any:
    """Return rows with length 1; transformers' l2norm has the same eps."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _conv(function: Function) -> Function:
    """Return a causal convolution with the parameters of transformers' functions."""

    def conv(
        hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None,
        cu_seq_lens_q: Any = None, seq_idx: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        if activation not in (None, "silu", "swish"):
            return function(hidden_states, weight, bias, activation=activation, **options)
        x = hidden_states.transpose(1, 2)
        y, _ = causal_conv(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype),
            offsets=_offsets(cu_seq_lens_q, seq_idx), activation=activation and "silu",
        )  # fmt: skip
        return y.transpose(1, 2)

    return conv


def _scan(function: Function) -> Function:
    """Return Mamba2's scan with the parameters of transformers' functions."""

    def scan(
        hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int,  # noqa: N803
        D: Any = None, dt_bias: Any = None, initial_states: Any = None,  # noqa: N803
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False, z: Any = None, cu_seq_lens_q: Any = None,
        seq_idx: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        if not dt_softplus or z is not None:
            return function(
                hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, z=z,
                initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit,
                return_final_states=return_final_states, **options,
            )  # fmt: skip
        most = float(dt_limit[1])
        start = None if initial_states is None else initial_states.float().transpose(-1, -2)
        y, final = ssd(
            hidden_states, dt, (-A.float()).log(), B, C, D, dt_bias, initial=start,
            offsets=_offsets(cu_seq_lens_q, seq_idx),
            dt_min=float(dt_limit[0]), dt_max=most if most < math.inf else None,
        )  # fmt: skip
        return (y, final.transpose(-1, -2)) if return_final_states else y

    return scan


def _unfused(function: Function) -> Function:
    """Return a function that returns None: the module then calls its steps one by one."""
    return lambda *_, **__: None


def _offsets(ends: Any, numbers: Any) -> Any:
    """Return the offsets of packed texts, from offsets or from the text index of each token."""
    if ends is not None or numbers is None:
        return ends
    starts = torch.nonzero(numbers[0, 1:] != numbers[0, :-1])[:, 0] + 1
    zero, count = starts.new_zeros(1), starts.new_full((1,), numbers.shape[1])
    return torch.cat([zero, starts, count])


# parameters that a function has, parameters that it does not have, and its replacement
KINDS: tuple[tuple[set[str], set[str], Make], ...] = (
    ({"query", "key", "value", "g", "beta"}, set(), _delta),
    ({"dt", "A", "B", "C", "chunk_size", "initial_states"}, set(), _scan),
    ({"hidden_states", "weight", "bias", "activation"}, {"conv_state"}, _conv),
    ({"outproj_weight", "chunk_size"}, set(), _unfused),
)
