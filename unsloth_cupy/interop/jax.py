"""Runs ops in JAX, with gradients, under jit, grad, vmap, checkpoint, scan and shard_map.

    from unsloth_cupy import rms_norm            accepts traced arrays
    slope = jax.jit(jax.grad(lambda x: rms_norm(x, weight).sum()))

This module has the library's functions under the same names.  A call with concrete arrays runs
immediately on their memory.  A traced call becomes a ``jax.custom_vjp``: forward is a callback that
runs the op on XLA's buffers, and the gradient is the backward op.  In short:

    @jax.custom_vjp
    def swiglu(gate, up):
        return buffer_callback(run, form_of_y)(gate, up)

Options, quantized weights and an ``AttentionConfig`` are constants of a trace.  A seed that is an
array is an operand, so each step of a compiled function draws other random numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from ..core.call import coerce_option, option_of
from ..core.dtypes import Stored
from ..core.op import INTEGER, Op, Traced
from ..core.replay import choices, choosing
from ..errors import ConfigError, GradientError
from . import _jax_arrays as memory
from ._jax_callback import on_buffers
from ._wiring import (
    SEED,
    forms,
    gradient_names,
    is_weight,
    may_be_number,
    module_names,
    no_gradient,
    quantized,
    shared_outputs,
    table_gradient,
    writes_in_place,
)

KEPT = 4096  # functions in a cache; before one more is added, the cache is cleared
functions: dict[Any, Callable[..., Any]] = {}
# Functions of calls with quantized weights, by the first weight.  They refer not to the weight but
# to a twin, another object with the same attributes, so that they are deleted with the weight.
on_weights: WeakKeyDictionary[Stored, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()
concrete: set[type[Any]] = {type(None)}  # classes of arrays with values
__getattr__, __dir__ = module_names(globals())


class Call(NamedTuple):
    """A call without its arrays."""

    op: Op[..., Any]
    names: tuple[str, ...]  # names of the arrays; a seed that is an array comes last
    fixed: dict[str, Any]  # integers and quantized weights instead of arrays, then options
    choices: tuple[Any, ...]  # the ``choices`` of ``core.replay`` for its launches


def run(op: Op[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on arrays of JAX; the library's functions call this."""
    if SEED in options and isinstance(seed := _checked_seed(op, options[SEED]), jax.Array):
        if isinstance(seed, jax.core.Tracer):
            return traced(op, arrays, options)
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            options[SEED] = int(seed) % 2**64
    for array in arrays:
        if array.__class__ not in concrete and not _is_concrete(array):
            return _run_other(op, arrays, options)
    return memory.run(op, arrays, options)


def _is_concrete(array: Any) -> bool:
    """Return whether an array of JAX has values; if so, add its class to ``concrete``."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return False
    if memory.are_keys(array):
        return False
    concrete.add(array.__class__)
    return True


def _run_other(op: Op[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on arguments that are not all concrete arrays of JAX."""
    if any(isinstance(array, Traced) for array in arrays):  # on a tape of the library
        return op.plan(arrays)(list(arrays), options)
    memory.check_numbers(op, arrays)
    arrays = memory.with_integers(op, arrays)
    tracers = any(isinstance(array, jax.core.Tracer) for array in arrays)
    return (traced if tracers else memory.run_checked)(op, arrays, options)


def traced(op: Op[..., Any], arrays: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call an op with some traced arrays."""
    if writes_in_place(op):
        problem = "changes its arguments, and arrays of JAX cannot be changed"
        raise ConfigError(f"{op.called} {problem}; call the function without the underscore")
    operands: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for operand, array in zip(op.contract.inputs, arrays, strict=True):
        if type(array) is int and may_be_number(operand):
            fixed[operand.name] = array
        elif isinstance(array, jax.Array):
            operands[operand.name] = array
        elif isinstance(array, Stored):
            if not is_weight(operand):
                raise quantized(op, operand)
            fixed[operand.name] = array
        elif array is not None:
            op.library_of(arrays)  # raises an error with the library of each array
    parameters = inspect.signature(op.definition).parameters
    for name, value in options.items():
        if name == SEED and isinstance(seed := _checked_seed(op, value), jax.Array):
            operands[SEED] = seed
        elif value is None or option_of(parameters[name]) is None:
            fixed[name] = value
        else:
            fixed[name] = coerce_option(op.called, parameters, name, value)
    operands = memory.alike(operands)
    if "constant" in op.facts:
        operands = {name: jax.lax.stop_gradient(array) for name, array in operands.items()}
    call = Call(op, tuple(operands), fixed, choices.get())
    outputs = differentiable(call)(*operands.values())
    results = tuple(outputs[output.name] for output in op.contract.outputs)
    return results if len(results) > 1 else results[0]


def _checked_seed(op: Op[..., Any], seed: Any) -> Any:
    """Return a seed; raise for an array of JAX that is not a single integer."""
    if isinstance(seed, jax.Array):
        call = op.called
        if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
            raise ConfigError(f"{call}: seed is a key of jax.random; pass jax.random.bits(key)")
        if seed.shape or seed.dtype.kind not in "iu":
            problem = f"seed is an array {seed.shape} of {seed.dtype}"
            raise ConfigError(f"{call}: {problem}; pass one integer, as jax.random.bits(key) is")
    return seed


def differentiable(call: Call) -> Callable[..., Any]:
    """Return the cached function of a call, from its arrays to its outputs by name."""
    weights = {n: value for n, value in call.fixed.items() if isinstance(value, Stored)}
    known = functions
    if weights:
        known = on_weights.setdefault(next(iter(weights.values())), {})
        twins = {name: _twin(weight) for name, weight in weights.items()}
        call = call._replace(fixed=call.fixed | twins)
    fixed = ((name, _fixed(value)) for name, value in call.fixed.items())
    key = (call.op, call.names, call.choices, *fixed)
    if key not in known:
        if len(known) >= KEPT:
            known.clear()
        known[key] = _differentiable(call)
    return known[key]


def _twin(weight: Stored) -> Stored:
    """Return another object with the attributes of a weight; later changes affect both."""
    twin = object.__new__(type(weight))
    twin.__dict__ = weight.__dict__
    return twin


def _fixed(value: Any) -> Any:
    """Return a hashable key of an option's value: slices and lists are not hashable."""
    if isinstance(value, list | tuple):
        return tuple(map(_fixed, value))
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, Stored):
        return Stored, id(value.__dict__)
    return value.__class__, value


def _differentiable(call: Call) -> Callable[..., Any]:
    """Return a new function of a call's arrays, with a gradient."""
    # callbacks by the present outputs: for a new callback JAX would compile again
    callbacks: dict[tuple[str, ...], Callable[..., None]] = {}

    def named(*arrays: Any) -> dict[str, Any]:
        return _outputs(call, dict(zip(call.names, arrays, strict=True)), callbacks)

    named.__name__ = named.__qualname__ = call.op.__name__  # shown in JAX's profiles
    function: Any = jax.custom_vjp(named)

    def forward(*arrays: Any) -> Any:
        outputs = function(*[array.value for array in arrays])
        pairs = [*zip(call.names, arrays, strict=True)]
        backward = call.op.backward
        values = {name: array.value for name, array in pairs} | outputs
        needed = () if backward is None else (*backward.names, *({SEED} & backward.options))
        saved = {name: values[name] for name in needed if values.get(name) is not None}
        return outputs, (saved, {name: None for name, array in pairs if array.perturbed})

    def backward(residuals: Any, grads: Any) -> Any:
        used = {n: g for n, g in grads.items() if g is not None and type(g) is not SymbolicZero}
        gradients: Mapping[str, Any] = {}
        if used:
            zeros = {n: g for n, g in grads.items() if type(g) is SymbolicZero}
            values, perturbed = residuals
            gradients = _gradients(call, values, perturbed, used, zeros)
        return tuple(gradients.get(f"d{name}") for name in call.names)

    function.defvjp(forward, backward, symbolic_zeros=True)
    if any(isinstance(value, Stored) for value in call.fixed.values()):
        # no jit: an inner jit outlives the outer one, and would keep the weight alive
        return function
    return jax.jit(function)  # without it each call outside a jit would trace again


def _outputs(
    call: Call, arrays: dict[str, Any], callbacks: dict[tuple[str, ...], Callable[..., None]]
) -> dict[str, Any]:
    """Return the outputs of a traced call by name; absent outputs are None."""
    op, operands = call.op, {name: array for name, array in arrays.items() if name != SEED}
    options = {SEED: 0} | call.fixed if SEED in arrays else call.fixed
    inputs = operands | {name: _form(call.fixed[name]) for name in op.names if name in call.fixed}
    output_forms = forms(op, inputs, options)
    make: Any = jax.ShapeDtypeStruct
    new = {
        name: make(form.shape, jax.dtypes.canonicalize_dtype(form.dtype))
        for name, form in output_forms.items()
        if form is not None
    }
    outputs = tuple(new)
    if outputs not in callbacks:
        callbacks[outputs] = on_buffers(op, call.names, call.fixed, outputs, call.choices)
    called = buffer_callback(
        callbacks[outputs],
        tuple(new.values()),
        vmap_method="broadcast_all" if _takes_rows(call) else "sequential",
        command_buffer_compatible=SEED not in arrays,  # a seed is read on the host
    )
    results = dict(zip(outputs, called(*arrays.values()), strict=True))
    results = memory.alike(arrays | results, only=results)
    results = dict.fromkeys(output_forms) | results
    shared = shared_outputs(op, operands)
    return results | {name: (operands | results)[of] for name, of in shared.items()}


def _form(fixed: Any) -> Any:
    """Return an argument of ``forms`` for an integer or a quantized weight."""
    return fixed if isinstance(fixed, Stored) else INTEGER


def _takes_rows(call: Call) -> bool:
    """Return whether one call can compute a batch: all arrays begin with the same ``*`` axes."""
    contract = call.op.contract
    inputs = [operand for operand in contract.inputs if operand.name in call.names]
    outputs = [operand for operand in contract.outputs if operand.kind != "none"]
    leads = {"".join(operand.axes[:1]) for operand in (*inputs, *outputs)}
    return SEED not in call.names and len(leads) == 1 and leads.pop().startswith("*")


def _gradients(
    call: Call,
    values: dict[str, Any],
    perturbed: Mapping[str, None],
    used: Mapping[str, Any],
    zeros: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the gradients of perturbed operands from the upstream gradients of used outputs."""
    op, backward = call.op, call.op.backward
    kinds = {operand.name: operand.kind for operand in op.contract.inputs}
    if backward is None:
        raise no_gradient(op)
    stopped = "pass it through jax.lax.stop_gradient"
    for name in perturbed:
        if kinds[name] == "table":
            raise table_gradient(op, name, stopped)
    if without := used.keys() - {*gradient_names(op)}:
        name = min(without)
        raise GradientError(f"{op.called}: its result {name} has no gradient; {stopped}")
    required = {operand.name for operand in backward.contract.inputs if not operand.optional}
    values = values | {f"d{name}": grad for name, grad in used.items()}
    for name, grad in zeros.items():
        if f"d{name}" in required:
            values[f"d{name}"] = jax.numpy.zeros(grad.shape, grad.dtype)
    options = {name: value for name, value in call.fixed.items() if name in backward.options}
    options |= {SEED: values[SEED]} if SEED in values else {}
    if "wanted" in backward.options:
        options["wanted"] = frozenset(perturbed)
    arrays = [values.get(name, call.fixed.get(name)) for name in backward.names]
    result = choosing(call.choices, backward.call, arrays, options)
    results = result if type(result) is tuple else (result,)
    named = zip(backward.contract.outputs, results, strict=True)
    return {output.name: grad for output, grad in named if output.name[1:] in perturbed}
