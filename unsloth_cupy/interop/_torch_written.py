"""The functions of an op on eager tensors, written from its signature.

``compute`` runs the op on the memory of tensors.  ``forward`` and ``backward`` are those of a
``torch.autograd.Function``: what the backward op asks for is kept, and no more.  ``call`` chooses,
and ``traced`` goes through ``torch.ops``, or to ``outside`` with a quantized weight, which no graph
holds.  All take arrays, then options, as the definition does.
"""

from collections.abc import Iterable
from typing import Any

from ..core.dtypes import DIFFERENTIABLE
from ..core.op import Op
from ..core.signature import Operand
from ._torch_operators import Operator
from ._wiring import SEED, gradient_names, is_gradient, is_weight, may_be_number, needed

COMPUTE = """
def computed({given}):
    try:
        {adopted}
    except REFUSED as error:
        refuse(({tensors}), error)
    try:
        {found} = op({passed})
    except FrameworkError:
        check_together(({tensors}))
        raise
    arrays, tensors = ({arrays}), ({tensors})
    return {results}

def compute({given}):
    if {lead}.is_cuda:
        with stream({lead}):
            return computed({given})
    return computed({given})
"""
CALL = """
def call({given}):
    if (
        compiling() or functorch() or modes() or recording() or forward_ad._current_level >= 0
        or {strange}
    ):
        return traced({given})
"""
OUTSIDE = """
def outside({given}):
    check_outside(({tensors}))
"""
CHOICE = """
    {cast}
    if grad_enabled() and ({asked}):
        {found} = apply({given})
    else:
        {found} = compute({given})
    return {outputs}

"""
TRACED = """
def traced({given}):
    for each in ({tensors}):
        if isinstance(each, Traced):  # a tape of the library's own records the call
            return each.run_op(op, [{tensors}], {{{options}}})
    if {quantized}:
        return outside({given})
    check(({tensors}))
    {found} = door({flat})
    return {graphed}
"""
FUNCTION = """
def forward(ctx, {given}):
    {found} = compute({given})
    ctx.save_for_backward({saved})
    ctx.set_materialize_grads(False)
    {noted}
    return {found}

def backward(ctx, {grads}):
    if {unused}:
        return {nothing}
    ({kept}) = ctx.saved_tensors
    {filled}
    {gradients} = behind({passed})
    return {returned}
"""


def _join(parts: Iterable[str]) -> str:
    return "".join(part + ", " for part in parts)


def _lines(lines: Iterable[str], depth: int = 1) -> str:
    return ("\n" + "    " * depth).join(lines) or "pass"


def _results(parts: list[str]) -> str:
    return ", ".join(parts)  # of one result no tuple


def compute_source(op: Op[..., Any], order: list[str]) -> str:
    """Return the source of ``compute``; ``order`` is that of the definition's parameters."""
    names, inputs, outputs = op.names, op.contract.inputs, op.contract.outputs
    passed = [f"_{name}" for name in names[: op.positional]]
    passed += [f"{name}=_{name}" for name in names[op.positional :]]
    passed += [f"{name}={name}" for name in order if name in op.options]
    return COMPUTE.format(
        given=", ".join(order),
        adopted=_lines([f"_{o.name} = {_adopted(o)}" for o in inputs], 2),
        tensors=_join(names),
        arrays=_join(f"_{name}" for name in names),
        passed=", ".join(passed),
        found=_results([f"_{o.name}" for o in outputs]),
        results=_results([_made(op, o) for o in outputs]),
        lead=lead_of(op),
    )


def call_source(op: Op[..., Any], order: list[str], *, outside: bool = False) -> str:
    """Return the source of ``call``, or of ``outside``."""
    inputs, outputs = op.contract.inputs, op.contract.outputs
    floats = [o for o in inputs if o.kind in (*DIFFERENTIABLE, "table")]
    asked = [_asks(o) for o in floats if "constant" not in op.facts]
    cast = [f"{SEED} = seed_of({SEED})"] if SEED in op.options else []
    if op.backward is not None:
        cast += [
            "if autocast():",
            f"    {_join(op.names)} = cast(({_join(op.names)}), {lead_of(op)}.device.type)",
        ]
    return ((OUTSIDE if outside else CALL) + CHOICE).format(
        given=", ".join(order),
        tensors=_join(op.names),
        strange=" or ".join(map(_strange, inputs)),
        cast=_lines(cast),
        asked=" or ".join(asked) or "False",
        found=_results([o.name for o in outputs]),
        outputs=_results([_output(op, o) for o in outputs]),
    )


def traced_source(operator: Operator) -> str:
    """Return the source of ``traced``."""
    op, outputs = operator.op, operator.op.contract.outputs
    flat = [f"number({n})" if n in operator.numbers else n for n in operator.tensors]
    flat += [n if c.encode is None else f"encode_{n}({n})" for n, c in operator.codecs.items()]
    return TRACED.format(
        given=", ".join(operator.order),
        quantized=" or ".join(_other(o) for o in op.contract.inputs if is_weight(o)) or "False",
        tensors=_join(op.names),
        options=_join(f"{n!r}: {n}" for n in operator.order if n in op.options),
        found=_results([o.name for o in outputs]),
        flat=", ".join(flat),
        graphed=_results([_output(op, o, graphed=True) for o in outputs]),
    )


def function_source(
    op: Op[..., Any], order: list[str], behind: Op[..., Any], behind_order: list[str]
) -> str:
    """Return the source of ``forward`` and ``backward``."""
    outputs = {o.name: o for o in op.contract.outputs}
    taken = [*gradient_names(op)]
    others = {o.name: _other(o) for o in op.contract.inputs if may_be_number(o) or is_weight(o)}
    kept = [n for n in behind.names if n in op.names or n in outputs]
    saved = {n: _output(op, outputs[n]) if n in outputs else n for n in kept}
    saved |= {n: f"None if {other} else {n}" for n, other in others.items() if n in kept}
    options = [name for name in behind_order if name in op.options]
    must = [o.name[1:] for o in behind.contract.inputs if o.name[1:] in taken and not o.optional]
    lone = len(taken) == 1
    idle = [name for name in outputs if name not in taken]
    noted = [f"ctx.options = {_join(options)}"] if options else []
    noted += [f"ctx.mark_non_differentiable({', '.join(idle)})"] if idle else []
    noted += [f"ctx.{n} = {n}.shape, {n}.dtype, {n}.device" for n in must if not lone]
    noted += [f"ctx.{n} = {n} if {o} else None" for n, o in others.items() if n in kept]
    filled = [f"({_join(options)}) = ctx.options"] if options else []
    filled += [f"if d{n} is None: d{n} = zeros(*ctx.{n})" for n in must if not lone]
    filled += [f"if ctx.{n} is not None: {n} = ctx.{n}" for n in others if n in kept]
    filled += [
        f"if ctx.needs_input_grad[{i}]: raise table_gradient(op, {o.name!r}, 'detach it')"
        for i, o in enumerate(op.contract.inputs)
        if o.kind == "table"
    ]
    passed = ["wanted(ctx.needs_input_grad)" if n == "wanted" else n for n in behind_order]
    gradients = [o.name for o in behind.contract.outputs]
    return FUNCTION.format(
        given=", ".join(order),
        found=_results([*outputs]),
        saved=", ".join(saved[n] for n in kept),
        noted=_lines(noted),
        grads=", ".join(f"d{n}" for n in outputs),
        unused=" and ".join(f"d{n} is None" for n in taken),
        nothing=_join(["None"] * len(order)),
        kept=_join(kept),
        filled=_lines(filled),
        gradients=_results(gradients),
        passed=", ".join(passed),
        returned=_join(f"d{n}" if f"d{n}" in gradients else "None" for n in order),
    )


def lead_of(op: Op[..., Any]) -> str:
    """Return the first array that is never absent, and a tensor if one must be."""
    there = [o for o in op.contract.inputs if not o.optional]
    return min(there, key=is_weight).name


def _adopted(operand: Operand) -> str:
    name = operand.name
    if may_be_number(operand):
        return f"{name} if {name} is None or {name}.__class__ is int else array_of({name})"
    if is_weight(operand):
        return f"{name} if {_other(operand)} else array_of({name})"
    return f"None if {name} is None else " * operand.optional + f"array_of({name})"


def _strange(operand: Operand) -> str:
    """Return when an operand is nothing that an eager call takes."""
    name = operand.name
    kinds = "or_number" if may_be_number(operand) else "or_none" if operand.optional else "plain"
    return f"{name}.__class__ not in {kinds}" + f" and not {_other(operand)}" * is_weight(operand)


def _other(operand: Operand) -> str:
    """Return when an operand is no tensor, but a number or a quantized weight."""
    name = operand.name
    return f"isinstance({name}, Stored)" if is_weight(operand) else f"{name}.__class__ is int"


def _asks(operand: Operand) -> str:
    """Return when a gradient of an operand is asked for."""
    name, asks = operand.name, f"{operand.name}.requires_grad"
    if is_weight(operand):
        return f"(not {_other(operand)} and {asks})"
    return f"({name} is not None and {asks})" if operand.optional else asks


def _alone(output: Operand) -> str:
    """Return when an output that is a sum is its first term, which then stands for it."""
    return " and ".join(f"{term} is None" for term in output.terms[1:]) or "True"


def _lacks(op: Op[..., Any], output: Operand) -> str:
    """Return when an output is None; nothing for never."""
    found = [f"{name} is None" for name in needed(op, output)]
    if "wanted" in op.options and is_gradient(op, output):
        found.append(f"(wanted is not None and {output.name[1:]!r} not in wanted)")
    return " or ".join(found)


def _made(op: Op[..., Any], output: Operand) -> str:
    """Return what ``compute`` makes of an output: None of one that stands elsewhere."""
    array = f"_{output.name}"
    conditions, lacks = [_alone(output)] if output.terms else [], _lacks(op, output)
    conditions += [lacks, f"{array} is None"] if lacks else []
    if output.kind == "none" or "True" in conditions:
        return "None"
    condition = " or ".join(conditions)
    return f"None if {condition} else " * bool(condition) + f"tensor_of({array}, arrays, tensors)"


def _output(op: Op[..., Any], output: Operand, *, graphed: bool = False) -> str:
    """Return what a caller gets for an output; in a graph, what is absent has size 0."""
    lacks = _lacks(op, output)
    if output.kind == "none":
        return "None"
    if not output.terms:
        return f"None if {lacks} else {output.name}" if graphed and lacks else output.name
    alone, first = _alone(output), output.terms[0]
    if alone != "True":
        return f"{first} if {alone} else {output.name}"
    return f"None if {lacks} else {first}" if lacks else first
