"""Other implementations of ops: torch and, on a GPU, torch.compile and Liger's Triton kernels."""

import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 -- as torch's own pages call it

from ..core.dtypes import DIFFERENTIABLE, LEADING
from ..core.frameworks import FRAMEWORKS
from .cases import Call

Tensors = Mapping[str, Any]
Options = Mapping[str, Any]


def turned(x: Any, t: Tensors) -> Any:
    """Return x after rotary embedding with cos and sin."""
    cos, sin = t["cos"][None, :, None], t["sin"][None, :, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attended(t: Tensors, options: Options) -> Any:
    """Return torch attention of q, k and v, with the axes (batch, tokens, heads, dim)."""
    q, k, v = (t[name].transpose(1, 2) for name in "qkv")
    causal = options.get("causal", False)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


# Functions for ``op.facts["torch"]``, which receives the required arrays of ``cases.draw``.
NN = SimpleNamespace(**vars(F), turned=turned, attended=attended)

# From liger_kernel.transformers.functional.  Not comparable: geglu uses the tanh form, and
# cross_entropy overwrites the logits with gradients.
LIGER: dict[str, Callable[[Any, Tensors, Options], Any]] = {
    "rms_norm_forward": lambda liger, t, o: liger.liger_rms_norm(
        t["x"], t["weight"], o["eps"], 0.0, "llama", False
    ),
    "layer_norm_forward": lambda liger, t, o: liger.liger_layer_norm(
        t["x"], t["weight"], torch.zeros_like(t["weight"]), o["eps"]
    ),
    "swiglu": lambda liger, t, o: liger.liger_swiglu(t["gate"], t["up"]),
}  # fmt: skip
LIGER_OVERWRITES = ("swiglu",)  # its backward op cannot run twice on the same arrays


def contestants(
    call: Call, seeds: dict[str, Any] | None, gpu: bool, compiled: bool = True
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the peers of a forward call by name, and a note about each peer that fails.

    With ``seeds`` (upstream gradients), the peers compute the gradients of the inputs.  Without
    ``compiled`` torch.compile is left out, which takes seconds for each new shape.
    """
    name, notes = call.op.__name__, []
    functions: dict[str, Callable[..., Any]] = {}
    if ours := call.op.facts.get("torch"):
        functions["torch"] = plain = functools.partial(ours, NN)
    if gpu and ours and compiled:
        torch.compiler.reset()  # otherwise it stops compiling after a few shapes
        torch._functorch.config.donated_buffer = False  # backward runs many times
        functions["torch.compile"] = torch.compile(plain, dynamic=False)
    if gpu and name in LIGER and not (seeds and name in LIGER_OVERWRITES):
        try:
            liger = importlib.import_module("liger_kernel.transformers.functional")
        except ImportError as error:
            notes.append(f"Liger is left out ({error}): pip install liger-kernel")
        else:
            functions["Liger"] = lambda t, o: LIGER[name](liger, t, o)

    calls = {}
    for peer, function in functions.items():
        run = _run(call, function, seeds)
        try:
            run()
        except Exception as error:  # foreign code: note the failure and continue
            first = (str(error).strip() or repr(error)).splitlines()[0]
            notes.append(f"{peer} fails at {name} in {_dtype(call)}: {first}")
        else:
            calls[peer] = run
    return calls, notes


def _dtype(call: Call) -> str:
    names = [o.name for o in call.op.contract.inputs if o.kind in LEADING]
    return str(call.arrays[names[0]].dtype)


def tensor(array: Any) -> Any:
    """Return a copy of an array as a torch tensor on the same device."""
    return FRAMEWORKS["torch"].give_back(array, None).clone()


def _run(call: Call, function: Any, seeds: dict[str, Any] | None) -> Callable[[], Any]:
    tensors = {name: tensor(a) for name, a in call.arrays.items() if a is not None}
    if seeds is None:

        def forward() -> Any:
            with torch.no_grad():
                return function(tensors, call.options)

        return forward

    kinds = {o.name: o.kind for o in call.op.contract.inputs}
    leaves = [t.requires_grad_() for n, t in tensors.items() if kinds[n] in DIFFERENTIABLE]
    gradients = [tensor(seed) for seed in seeds.values()]
    recorded: list[Any] = []

    def backward() -> Any:
        if not recorded:  # in the first run, which is not timed
            outputs = function(tensors, call.options)
            recorded.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        cast = [g.to(out.dtype) for g, out in zip(gradients, recorded, strict=True)]
        return torch.autograd.grad(recorded, leaves, cast, retain_graph=True)

    return backward
