"""Norms and rotary embedding of queries and keys in one pass.

The source of a layer's forward is rewritten: ``self.q_norm(x)`` becomes ``x``, and the rotary
function gets the layer as an argument, whose norms have the weights.  The condition is that the
forward always normalizes and rotates, once each, and not in a branch.  Of a layer that rotates
queries and keys apart, ``x = self.q_norm(x)`` and the rotation of x must follow each other.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.call import write
from ...errors import ShapeError
from ..torch import qk_norm_rope
from ._changes import HOOKED, Changes, own_forward, place_of
from ._modules import eps_of
from ._rotary import ALONE, Rotation, decorated_as, named
from ._trials import Call, Refused, Texts, draw, near

Forward = Callable[..., Any]


def norms_of(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a layer's norms of queries and of keys; of keys there may be none."""
    names = [name for name in module._modules if "norm" in name]
    of_q, of_k = ([name for name in names if name.startswith(first)] for first in "qk")
    return (*of_q, *of_k) if len(of_q) == 1 and len(of_k) <= 1 else None


def take(
    changes: Changes, module: nn.Module, rotation: Rotation | None, call: Call | None, texts: Texts
) -> None:
    """Make a layer normalize and rotate in one pass; raise Refused if its results differ."""
    names: Any = norms_of(module)
    norms: list[Any] = [module.get_submodule(name) for name in names]
    if rotation is None or any(map(own_forward, norms)):
        raise Refused("its norms or its rotary embedding were not replaced")
    if call is None:
        raise Refused("it was not called")
    eps = {eps_of(norm) for norm in norms}
    if len(eps) > 1:
        raise Refused("its norms have two eps")
    random = {
        f"{name}.weight": draw(*norm.weight.shape) for name, norm in zip(names, norms, strict=True)
    }
    expected = texts.kept(call.wide(module, random))
    turned, count = vars(module)[place_of(module)].__func__, len(changes)
    apart = rotation in ALONE
    if len(names) < 2 and not apart:
        raise Refused("it has no norm of keys")
    for offset in (0.0, 1.0):  # 1.0: weights are stored minus 1, as in Gemma
        make = _turn_apart if apart else partial(_turn, names=names)
        turn = make(rotation, eps=min(eps), offset=offset)
        changes.forward(module, _either(names, _joined(module, names, turn, apart), turned))
        try:
            result = texts.kept(call.wide(module, random))
        except ShapeError:
            raise Refused("its norms are not of each head") from None
        if near(result, expected, torch.float32):
            return
        changes.since(count)
    raise Refused("it does more than normalize and rotate")


def _turn_apart(rotation: Rotation, **options: float) -> Forward:
    """Return a rotary function of one array, whose first arguments are a layer and a norm's name.

    It also normalizes.
    """

    def turn(layer: Any, name: str, *args: Any, **more: Any) -> Any:
        def normed(q: Any, k: Any, *tables: Any, interleaved: bool) -> Any:
            weight = getattr(layer, name).weight  # k has no heads
            return qk_norm_rope(q, k, weight, weight, *tables, interleaved=interleaved, **options)

        return rotation(normed, *args, **more)

    return turn


def _turn(rotation: Rotation, names: tuple[str, str], **options: float) -> Forward:
    """Return a rotary function with the layer as first argument, which also normalizes."""

    def turn(layer: Any, *args: Any, **more: Any) -> Any:
        def normed(q: Any, k: Any, *tables: Any, interleaved: bool) -> Any:
            weights = [getattr(layer, name).weight for name in names]
            return qk_norm_rope(q, k, *weights, *tables, interleaved=interleaved, **options)

        return rotation(normed, *args, **more)

    return turn


def _either(names: tuple[str, ...], joined: Forward, turned: Forward) -> Forward:
    """Return a forward that is ``joined`` if no hook must see the norms, else ``turned``."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        bare = all(_is_bare(getattr(self, name)) for name in names)
        return (joined if bare else turned)(self, *args, **options)

    return forward


def _is_bare(norm: Any) -> bool:
    """Return whether a norm has its weight, and no hooks, which need a call of its forward."""
    hooks = norm._forward_pre_hooks or norm._forward_hooks or norm._backward_hooks
    return "weight" in norm._parameters and HOOKED not in vars(norm) and not hooks


def _joined(module: nn.Module, names: tuple[str, ...], turn: Forward, apart: bool) -> Forward:
    """Return a layer's forward that passes queries and keys to ``turn`` without norms."""
    forward: Any = type(module).forward
    plain = inspect.unwrap(forward)
    function, rotary = _source(forward, plain), next(iter(named(module)), "")
    used = [getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(function)]
    if apart:
        pairs = _Pairs(function.args.args[0].arg, rotary)
        pairs.visit(function)
        counts = {rotary: len(pairs.written), **dict.fromkeys(pairs.written, 1)}
        whole = {*names} <= {*pairs.written}
    else:
        counts = {rotary: 1, **dict.fromkeys(names, 1)}
        writer = _Writer(function.args.args[0].arg, rotary, names)
        writer.visit(function)
        whole = writer.written == counts
    if not whole or any(used.count(name) != count for name, count in counts.items()):
        raise Refused("it does not always normalize and rotate, once each")
    scope = plain.__globals__ | {rotary: turn}
    del scope["__name__"]  # with it, torch.compile would use the globals of the module
    write(f"forward of {type(module).__name__}", ast.unparse(function), scope)
    return decorated_as(forward, scope[function.name])


def _source(forward: Any, plain: Any) -> ast.FunctionDef:
    """Return the definition of a forward, without its decorators and annotations."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    except OSError:
        raise Refused("its source is not available") from None
    if not isinstance(function, ast.FunctionDef) or plain.__closure__:
        raise Refused("its forward is not a function of its module")
    if len(function.decorator_list) > _decorators(forward):
        raise Refused("a decorator of its forward cannot be copied")
    function.decorator_list = []
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    function.returns = None
    return function


def _decorators(forward: Any) -> int:
    """Return the number of a function's decorators that set ``__wrapped__``."""
    return 1 + _decorators(forward.__wrapped__) if hasattr(forward, "__wrapped__") else 0


class _Writer(ast.NodeTransformer):
    """Removes norms from statements that always run; passes the layer to the rotary function."""

    def __init__(self, layer: str, rotary: str, names: tuple[str, ...]) -> None:
        self.layer, self.rotary, self.names = layer, rotary, names
        self.written: dict[str, int] = {}

    def visit(self, node: ast.AST) -> Any:
        """Visit only code that always runs."""
        at_times = ast.If | ast.For | ast.While | ast.Try | ast.With | ast.IfExp | ast.BoolOp
        return node if isinstance(node, at_times | ast.Lambda) else super().visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        """Rewrite a call after its arguments."""
        self.generic_visit(node)
        match node.func:
            case ast.Name(id=name) if name == self.rotary:
                self._count(name)
                node.args.insert(0, ast.Name(self.layer, ast.Load()))
            case ast.Attribute(ast.Name(id=self.layer), name) if name in self.names:
                if len(node.args) == 1 and not node.keywords:
                    self._count(name)
                    return node.args[0]
        return node

    def _count(self, name: str) -> None:
        """Count a rewritten call."""
        self.written[name] = self.written.get(name, 0) + 1


class _Pairs(ast.NodeTransformer):
    """Joins a norm of queries or keys with the statement after it, which rotates its result."""

    def __init__(self, layer: str, rotary: str) -> None:
        self.layer, self.rotary = layer, rotary
        self.written: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Join the statements of each block."""
        super().generic_visit(node)
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(block, list):
                joined: list[Any] = []
                for each in block:
                    if joined and self._pair(joined[-1], each):
                        joined.pop()
                    joined.append(each)
                block[:] = joined
        return node

    def _pair(self, norm: ast.AST, turn: ast.AST) -> bool:
        """Return whether two statements are a pair; if so, the second gets layer and norm."""
        match norm, turn:
            case (
                ast.Assign(
                    [ast.Name(target)],
                    ast.Call(ast.Attribute(ast.Name(layer), name), [ast.Name(source)], []),
                ),
                ast.Assign(
                    [ast.Name(result)],
                    ast.Call(ast.Name(rotary), [ast.Name(argument), *_]) as call,
                ),
            ) if (layer, rotary) == (self.layer, self.rotary) and "norm" in name:
                if {target, source, result, argument} != {target}:
                    return False
                call.args[:0] = [ast.Name(layer, ast.Load()), ast.Constant(name)]
                self.written.append(name)
                return True
        return False
