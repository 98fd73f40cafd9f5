"""Every op with a gradient inside of JAX: under jit, grad, vmap, checkpoint, scan and shard_map.

    from unsloth_cupy import rms_norm            traced arrays go in
    slope = jax.jit(jax.grad(lambda x: rms_norm(x, weight).sum()))

This module holds the same functions under the same names.  A call whose arrays are all there runs
at once, on their memory.  A traced one becomes a ``jax.custom_vjp`` around a callback that runs
the op on XLA's own buffers, and whose gradient is the backward op.  In short:

    @jax.custom_vjp
    def swiglu(gate, up):
        return buffer_callback(run, form_of_y)(gate, up)

Options are constants of a trace, and so are quantized weights.  A seed may be an array: it is an
operand then, and each step of a compiled function draws anew.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.custom_derivatives import SymbolicZero

from ..core.call import coerce_option, option_of
from ..core.dtypes import Stored
from ..core.op import INTEGER, Op, Traced
from ..errors import ConfigError, GradientError
from . import _jax_arrays as memory
from ._jax_callback import on_buffers
from ._wiring import (
    SEED,
    changes,
    forms,
    gradient_names,
    is_weight,
    may_be_number,
    module_names,
    no_gradient,
    quantized,
    same,
    table_gradient,
)

buffer_callback: Callable[..., Callable[..., Any]]
try:
    from jax.experimental import buffer_callback as experimental
except ImportError:  # JAX before 0.6.1, or one that gave up what is an experiment
    from ._jax_ffi import ffi_callback as buffer_callback
else:
    buffer_callback = experimental.buffer_callback

KEPT = 4096  # functions of calls; beyond them all are made anew
functions: dict[Any, Callable[..., Any]] = {}
# of calls with a quantized weight, by the first of them: they die with it, as they hold no weight
# but another object of the same attributes
on_weights: WeakKeyDictionary[Stored, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()
there: set[type[Any]] = {type(None)}  # classes of arrays that have values
__getattr__, __dir__ = module_names(globals())


class Call(NamedTuple):
    """A call but for its arrays."""

    op: Op[..., Any]
    names: tuple[str, ...]  # of the arrays; a seed that is one comes last
    fixed: dict[str, Any]  # numbers and quantized weights, which are no operands; then options


def run(op: Op[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on arrays of JAX: what the library's functions do with them."""
    if SEED in options and isinstance(seed := _checked_seed(op, options[SEED]), jax.Array):
        if isinstance(seed, jax.core.Tracer):
            return traced(op, arrays, options)
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            options[SEED] = int(seed) % 2**64
    for array in arrays:
        if array.__class__ not in there and not _is_there(array):
            return _run_other(op, arrays, options)
    return memory.run(op, arrays, options)


def _is_there(array: Any) -> bool:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return False
    if memory.are_keys(array):
        return False
    there.add(array.__class__)
    return True


def _run_other(op: Op[..., Any], arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on what are not all arrays with values."""
    if any(isinstance(array, Traced) for array in arrays):  # on a tape of the library
        return op.plan(arrays)(list(arrays), options)
    memory.check_numbers(op, arrays)
    tracers = any(isinstance(array, jax.core.Tracer) for array in arrays)
    return (traced if tracers else memory.run_checked)(op, arrays, options)


def traced(op: Op[..., Any], arrays: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Call an op with arrays of which some stand for values that come later."""
    if changes(op):
        problem = "changes its arguments, which JAX's arrays never do"
        raise ConfigError(f"{op.called} {problem}; call the function without the underscore")
    given: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for operand, array in zip(op.contract.inputs, arrays, strict=True):
        if type(array) is int and may_be_number(operand):
            fixed[operand.name] = array
        elif isinstance(array, jax.Array):
            given[operand.name] = array
        elif isinstance(array, Stored):
            if not is_weight(operand):
                raise quantized(op, operand)
            fixed[operand.name] = array
        elif array is not None:
            op.library_of(arrays)  # names the library of each
    parameters = inspect.signature(op.definition).parameters
    for name, value in options.items():
        if name == SEED and isinstance(seed := _checked_seed(op, value), jax.Array):
            given[SEED] = seed
        elif value is None or option_of(parameters[name]) is None:
            fixed[name] = value
        else:
            fixed[name] = coerce_option(op.called, parameters, name, value)
    given = memory.alike(given)
    if "constant" in op.facts:
        given = {name: jax.lax.stop_gradient(array) for name, array in given.items()}
    found = differentiable(Call(op, tuple(given), fixed))(*given.values())
    results = tuple(found[output.name] for output in op.contract.outputs)
    return results if len(results) > 1 else results[0]


def _checked_seed(op: Op[..., Any], seed: Any) -> Any:
    """Return a seed; raise for an array of JAX that is not one."""
    if isinstance(seed, jax.Array):
        call = op.called
        if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
            raise ConfigError(f"{call}: seed is a key of jax.random; pass jax.random.bits(key)")
        if seed.shape or seed.dtype.kind not in "iu":
            problem = f"seed is an array {seed.shape} of {seed.dtype}"
            raise ConfigError(f"{call}: {problem}; pass one integer, as jax.random.bits(key) is")
    return seed


def differentiable(call: Call) -> Callable[..., Any]:
    """Return a function of the arrays of a call that returns its outputs by name."""
    weights = {n: value for n, value in call.fixed.items() if isinstance(value, Stored)}
    known = functions
    if weights:
        known = on_weights.setdefault(next(iter(weights.values())), {})
        twins = {name: _twin(weight) for name, weight in weights.items()}
        call = call._replace(fixed=call.fixed | twins)
    key = (call.op, call.names, *((name, _fixed(value)) for name, value in call.fixed.items()))
    if key not in known:
        if len(known) >= KEPT:
            known.clear()
        known[key] = _differentiable(call)
    return known[key]


def _twin(weight: Stored) -> Stored:
    """Return another object with all attributes of a weight, whose changes it sees too."""
    twin = object.__new__(type(weight))
    twin.__dict__ = weight.__dict__
    return twin


def _fixed(value: Any) -> Any:
    """Return what stands for an option in a key: slices and lists have no hash."""
    if isinstance(value, list | tuple):
        return tuple(map(_fixed, value))
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, Stored):
        return Stored, id(value.__dict__)
    return value.__class__, value


def _differentiable(call: Call) -> Callable[..., Any]:
    callbacks: dict[tuple[str, ...], Callable[..., None]] = {}  # a new one would compile anew

    def named(*arrays: Any) -> dict[str, Any]:
        return _outputs(call, dict(zip(call.names, arrays, strict=True)), callbacks)

    named.__name__ = named.__qualname__ = call.op.__name__  # what profiles of JAX show
    function: Any = jax.custom_vjp(named)

    def forward(*arrays: Any) -> Any:
        found = function(*[array.value for array in arrays])
        pairs = [*zip(call.names, arrays, strict=True)]
        behind = call.op.backward
        values = {name: array.value for name, array in pairs} | found
        asks = () if behind is None else (*behind.names, *({SEED} & behind.options))
        kept = {name: values[name] for name in asks if values.get(name) is not None}
        return found, (kept, {name: None for name, array in pairs if array.perturbed})

    def backward(kept: Any, grads: Any) -> Any:
        used = {n: g for n, g in grads.items() if g is not None and type(g) is not SymbolicZero}
        found: Mapping[str, Any] = {}
        if used:
            zeros = {n: g for n, g in grads.items() if type(g) is SymbolicZero}
            values, perturbed = kept
            found = _gradients(call, values, perturbed, used, zeros)
        return tuple(found.get(f"d{name}") for name in call.names)

    function.defvjp(forward, backward, symbolic_zeros=True)
    if any(isinstance(value, Stored) for value in call.fixed.values()):
        return function  # a jit inside of another is kept when that is gone, and the weight with it
    return jax.jit(function)  # or each call outside of a jit traces anew


def _outputs(
    call: Call, arrays: dict[str, Any], callbacks: dict[tuple[str, ...], Callable[..., None]]
) -> dict[str, Any]:
    """Return the outputs of a traced call by name, None for those that are absent."""
    op, given = call.op, {name: array for name, array in arrays.items() if name != SEED}
    options = {SEED: 0} | call.fixed if SEED in arrays else call.fixed
    asked = given | {name: _form(call.fixed[name]) for name in op.names if name in call.fixed}
    found = forms(op, asked, options)
    make: Any = jax.ShapeDtypeStruct
    new = {
        name: make(form.shape, jax.dtypes.canonicalize_dtype(form.dtype))
        for name, form in found.items()
        if form is not None
    }
    outputs = tuple(new)
    if outputs not in callbacks:
        callbacks[outputs] = on_buffers(op, call.names, call.fixed, outputs)
    called = buffer_callback(
        callbacks[outputs],
        tuple(new.values()),
        vmap_method="broadcast_all" if _takes_rows(call) else "sequential",
        command_buffer_compatible=SEED not in arrays,  # it is read on the host
    )
    made = dict(zip(outputs, called(*arrays.values()), strict=True))
    made = memory.alike(arrays | made, only=made)
    made |= {name: (given | made)[of] for name, of in same(op, given).items()}
    return dict.fromkeys(found) | made


def _form(fixed: Any) -> Any:
    """Return what stands for a number or a quantized weight where forms are asked."""
    return fixed if isinstance(fixed, Stored) else INTEGER


def _takes_rows(call: Call) -> bool:
    """Say whether one call does for a batch: each array leads with the same axes, of any number."""
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
    """Return the gradients of what is perturbed, given those of the outputs that are used."""
    op, behind = call.op, call.op.backward
    kinds = {operand.name: operand.kind for operand in op.contract.inputs}
    if behind is None:
        raise no_gradient(op)
    stopped = "pass it through jax.lax.stop_gradient"
    for name in perturbed:
        if kinds[name] == "table":
            raise table_gradient(op, name, stopped)
    if strange := used.keys() - {*gradient_names(op)}:
        name = min(strange)
        raise GradientError(f"{op.called}: its result {name} has no gradient; {stopped}")
    must = {operand.name for operand in behind.contract.inputs if not operand.optional}
    values = values | {f"d{name}": grad for name, grad in used.items()}
    for name, grad in zeros.items():
        if f"d{name}" in must:
            values[f"d{name}"] = jax.numpy.zeros(grad.shape, grad.dtype)
    options = {name: value for name, value in call.fixed.items() if name in behind.options}
    options |= {SEED: values[SEED]} if SEED in values else {}
    if "wanted" in behind.options:
        options["wanted"] = frozenset(perturbed)
    arrays = [values.get(name, call.fixed.get(name)) for name in behind.names]
    found = behind.call(arrays, options)
    results = found if type(found) is tuple else (found,)
    named = zip(behind.contract.outputs, results, strict=True)
    return {output.name: grad for output, grad in named if output.name[1:] in perturbed}
