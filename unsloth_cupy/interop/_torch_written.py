"""Generates the source of an op's functions for eager tensors, from its signature.

``compute`` runs the op on the memory of tensors.  ``forward`` and ``backward`` are the methods of a
``torch.autograd.Function``, which saves only tensors that the backward op needs.  ``call`` chooses
between them.  ``traced`` calls the operator in ``torch.ops``; with a quantized weight, which cannot
be in a graph, it calls ``outside``.  All have the parameters of the definition: arrays, then
options.
"""

from collections.abc import Iterable
from typing import Any

from ..core.dtypes import DIFFERENTIABLE
from ..core.op import Op
from ..core.signature import Operand
from ._torch_operators import Operator
from ._wiring import (
    SEED,
    gradient_names,
    is_gradient,
    is_weight,
    may_be_number,
    needed,
    operands_of,
)

COMPUTE = """
def computed({parameters}):
    try:
        {adopted}
    except REFUSED as error:
        refuse(({tensors}), error)
    try:
        {computed} = op({arguments})
    except FrameworkError:
        check_together(({tensors}))
        raise
    arrays, tensors = ({arrays}), ({tensors})
    return {results}

def compute({parameters}):
    if {lead}.is_cuda:
        with stream({lead}):
            return computed({parameters})
    return computed({parameters})
"""
CALL = """
def call({parameters}):
    if (
        compiling() or functorch() or modes() or recording() or forward_ad._current_level >= 0
        or {not_eager}
    ):
        return traced({parameters})
"""
OUTSIDE = """
def outside({parameters}):
    check_outside(({tensors}))
"""
CHOICE = """
    {cast}
    if grad_enabled() and ({needs_gradient}):
        {computed} = apply({parameters})
    else:
        {computed} = compute({parameters})
    return {returned}

"""
TRACED = """
def traced({parameters}):
    for each in ({tensors}):
        if isinstance(each, Traced):  # a tape of the library's own records the call
            return each.run_op(op, [{tensors}], {{{options}}})
    if {quantized}:
        return outside({parameters})
    check(({tensors}))
    {computed} = door({flattened})
    return {graphed}
"""
FUNCTION = """
def forward(ctx, {parameters}):
    {computed} = compute({parameters})
    ctx.save_for_backward({saved})
    ctx.set_materialize_grads(False)
    ctx.choices = choices()
    {notes}
    return {computed}

def backward(ctx, {grads}):
    if {unused}:
        return {nothing}
    ({saved_names}) = ctx.saved_tensors
    {filled}
    {gradients} = choosing(ctx.choices, backward_op, {arguments})
    return {returned}
"""


def _join(parts: Iterable[str]) -> str:
    """Return the source of the items of a tuple, which may have one item or none."""
    return "".join(part + ", " for part in parts)


def _lines(lines: Iterable[str], depth: int = 1) -> str:
    """Return indented lines of source; "pass" if there are none."""
    return ("\n" + "    " * depth).join(lines) or "pass"


def _results(parts: list[str]) -> str:
    """Return the source of results: a tuple if there are several."""
    return ", ".join(parts)


def compute_source(op: Op[..., Any], order: list[str]) -> str:
    """Return the source of ``compute``; ``order`` has the parameters of the definition in order."""
    names, inputs, outputs = op.names, op.contract.inputs, op.contract.outputs
    arguments = [f"_{name}" for name in names[: op.positional]]
    arguments += [f"{name}=_{name}" for name in names[op.positional :]]
    arguments += [f"{name}={name}" for name in order if name in op.options]
    return COMPUTE.format(
        parameters=", ".join(order),
        adopted=_lines([f"_{o.name} = {_adopted(o)}" for o in inputs], 2),
        tensors=_join(names),
        arrays=_join(f"_{name}" for name in names),
        arguments=", ".join(arguments),
        computed=_results([f"_{o.name}" for o in outputs]),
        results=_results([_result(op, o) for o in outputs]),
        lead=lead_of(op),
    )


def call_source(op: Op[..., Any], order: list[str], *, outside: bool = False) -> str:
    """Return the source of ``call``, or of ``outside``."""
    inputs, outputs = op.contract.inputs, op.contract.outputs
    floats = [o for o in inputs if o.kind in (*DIFFERENTIABLE, "table")]
    needs_gradient = [_needs_gradient(o) for o in floats if "constant" not in op.facts]
    cast = [f"{SEED} = seed_of({SEED})"] if SEED in op.options else []
    if op.backward is not None:
        cast += [
            "if autocast():",
            f"    {_join(op.names)} = cast(({_join(op.names)}), {lead_of(op)}.device.type)",
        ]
    return ((OUTSIDE if outside else CALL) + CHOICE).format(
        parameters=", ".join(order),
        tensors=_join(op.names),
        not_eager=" or ".join(map(_not_eager, inputs)),
        cast=_lines(cast),
        needs_gradient=" or ".join(needs_gradient) or "False",
        computed=_results([o.name for o in outputs]),
        returned=_results([_output(op, o) for o in outputs]),
    )


def traced_source(operator: Operator) -> str:
    """Return the source of ``traced``."""
    op, outputs = operator.op, operator.op.contract.outputs
    flattened = [f"number({n})" if n in operator.numbers else n for n in operator.tensors]
    flattened += [n if c.encode is None else f"encode_{n}({n})" for n, c in operator.codecs.items()]
    return TRACED.format(
        parameters=", ".join(operator.order),
        quantized=" or ".join(_not_tensor(o) for o in op.contract.inputs if is_weight(o))
        or "False",
        tensors=_join(op.names),
        options=_join(f"{n!r}: {n}" for n in operator.order if n in op.options),
        computed=_results([o.name for o in outputs]),
        flattened=", ".join(flattened),
        graphed=_results([_output(op, o, graphed=True) for o in outputs]),
    )


def function_source(
    op: Op[..., Any], order: list[str], backward: Op[..., Any], backward_order: list[str]
) -> str:
    """Return the source of ``forward`` and ``backward``."""
    outputs = {o.name: o for o in op.contract.outputs}
    differentiable = [*gradient_names(op)]
    others = {
        o.name: _not_tensor(o) for o in op.contract.inputs if may_be_number(o) or is_weight(o)
    }
    saved_names = [n for n in backward.names if n in op.names or n in outputs]
    saved = {n: _output(op, outputs[n]) if n in outputs else n for n in saved_names}
    saved |= {n: f"None if {other} else {n}" for n, other in others.items() if n in saved_names}
    options = [name for name in backward_order if name in op.options]
    required = [
        o.name[1:]
        for o in backward.contract.inputs
        if o.name[1:] in differentiable and not o.optional
    ]
    single = len(differentiable) == 1
    idle = [name for name in outputs if name not in differentiable]
    notes = [f"ctx.options = {_join(options)}"] if options else []
    notes += [f"ctx.mark_non_differentiable({', '.join(idle)})"] if idle else []
    notes += [f"ctx.{n} = {n}.shape, {n}.dtype, {n}.device" for n in required if not single]
    notes += [f"ctx.{n} = {n} if {o} else None" for n, o in others.items() if n in saved_names]
    filled = [f"({_join(options)}) = ctx.options"] if options else []
    filled += [f"if d{n} is None: d{n} = zeros(*ctx.{n})" for n in required if not single]
    filled += [f"if ctx.{n} is not None: {n} = ctx.{n}" for n in others if n in saved_names]
    filled += [
        f"if ctx.needs_input_grad[{i}]: raise table_gradient(op, {o.name!r}, 'detach it')"
        for i, o in enumerate(op.contract.inputs)
        if o.kind == "table"
    ]
    arguments = ["wanted(ctx.needs_input_grad)" if n == "wanted" else n for n in backward_order]
    gradients = [o.name for o in backward.contract.outputs]
    return FUNCTION.format(
        parameters=", ".join(order),
        computed=_results([*outputs]),
        saved=", ".join(saved[n] for n in saved_names),
        notes=_lines(notes),
        grads=", ".join(f"d{n}" for n in outputs),
        unused=" and ".join(f"d{n} is None" for n in differentiable),
        nothing=_join(["None"] * len(order)),
        saved_names=_join(saved_names),
        filled=_lines(filled),
        gradients=_results(gradients),
        arguments=", ".join(arguments),
        returned=_join(f"d{n}" if f"d{n}" in gradients else "None" for n in order),
    )


def lead_of(op: Op[..., Any]) -> str:
    """Return the first required operand, preferably an operand that cannot be quantized."""
    required = [o for o in op.contract.inputs if not o.optional]
    return min(required, key=is_weight).name


def _adopted(operand: Operand) -> str:
    """Return the source of an operand's array."""
    name = operand.name
    if may_be_number(operand):
        return f"{name} if {name} is None or {name}.__class__ is int else array_of({name})"
    if is_weight(operand):
        absent = f"{name} is None or " * operand.optional
        return f"{name} if {absent}{_not_tensor(operand)} else array_of({name})"
    return f"None if {name} is None else " * operand.optional + f"array_of({name})"


def _not_eager(operand: Operand) -> str:
    """Return the condition that an operand is no valid argument of an eager call."""
    name = operand.name
    kinds = "or_number" if may_be_number(operand) else "or_none" if operand.optional else "plain"
    condition = f"{name}.__class__ not in {kinds}"
    return condition + f" and not {_not_tensor(operand)}" * is_weight(operand)


def _not_tensor(operand: Operand) -> str:
    """Return the condition that an operand is a number or a quantized weight, not a tensor."""
    name = operand.name
    return f"isinstance({name}, Stored)" if is_weight(operand) else f"{name}.__class__ is int"


def _needs_gradient(operand: Operand) -> str:
    """Return the condition that an operand requires a gradient."""
    name, requires = operand.name, f"{operand.name}.requires_grad"
    if is_weight(operand):
        present = f"{name} is not None and " * operand.optional
        return f"({present}not {_not_tensor(operand)} and {requires})"
    return f"({name} is not None and {requires})" if operand.optional else requires


def _is_first_term(output: Operand) -> str:
    """Return the condition that only the first term of an output, a sum, is present."""
    return " and ".join(f"{term} is None" for term in output.terms[1:]) or "True"


def _is_absent(op: Op[..., Any], output: Operand) -> str:
    """Return the condition that an output is None; an empty text if it never is."""
    conditions = [f"{name} is None" for name in needed(op, output)]
    if "wanted" in op.options and is_gradient(op, output):
        names = operands_of(op, output)
        unwanted = " and ".join(["wanted is not None", *(f"{n!r} not in wanted" for n in names)])
        conditions.append(f"({unwanted})")
    return " or ".join(conditions)


def _result(op: Op[..., Any], output: Operand) -> str:
    """Return the source of a result of ``compute``: None for an output that is an operand."""
    array = f"_{output.name}"
    conditions, absent = [_is_first_term(output)] if output.terms else [], _is_absent(op, output)
    conditions += [absent, f"{array} is None"] if absent else []
    if output.kind == "none" or "True" in conditions:
        return "None"
    condition = " or ".join(conditions)
    return f"None if {condition} else " * bool(condition) + f"tensor_of({array}, arrays, tensors)"


def _output(op: Op[..., Any], output: Operand, *, graphed: bool = False) -> str:
    """Return the source of the value that a caller gets for an output.

    ``graphed``: the output comes from an operator, which returns a tensor of size 0 instead of None
    for an absent output.
    """
    absent = _is_absent(op, output)
    if output.kind == "none":
        return "None"
    if not output.terms:
        return f"None if {absent} else {output.name}" if graphed and absent else output.name
    is_first, first = _is_first_term(output), output.terms[0]
    if is_first != "True":
        return f"{first} if {is_first} else {output.name}"
    return f"None if {absent} else {first}" if absent else first
