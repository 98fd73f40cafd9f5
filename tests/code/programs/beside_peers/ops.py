"""Ops beside other implementations: all contestants of an op share a process and its tensors.

Each result, with gradients where the op has them, is compared with torch in float32 before it is
timed.  One that is too far from it is named, and has no time.
"""

import importlib
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 -- as torch's own pages call it

from .cases import OURS
from .machine import Clock, Machine, held

NEAR = 2e-2  # of a norm: results and gradients in bfloat16
NEARLY = 3e-2  # attention, 4 bits and recurrences round inside, too
Function = Callable[..., Any]


def of(module: str, name: str) -> Any:
    """Return a function of a library, or raise ImportError."""
    return getattr(importlib.import_module(module), name)


def without_init(*names: str) -> None:
    """Let modules of packages be imported without running the ``__init__`` of the packages."""
    for name in names:
        if name in sys.modules:
            continue
        folders = (Path(root, *name.split(".")) for root in sys.path)
        folder = next((each for each in folders if each.is_dir()), None)
        if folder is None:
            raise ImportError(f"no folder of {name}")
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module


class Comparison:
    """An op: its inputs, its definition in torch, and its contestants.

    ``seed`` is the gradient of the result; without it, only the forward pass runs.  ``counts`` has
    the bytes or flops that the op needs at least, for the roofline.
    """

    def __init__(
        self,
        machine: Machine,
        definition: Function,
        inputs: dict[str, Any],
        *leaves: str,
        seed: torch.Tensor | None = None,
        near: float = NEAR,
        **counts: float,
    ) -> None:
        self.machine, self.inputs, self.leaves = machine, inputs, leaves
        self.seed, self.near, self.counts = seed, near, counts
        self.calls: dict[str, Callable[[], Any]] = {}
        self.notes: dict[str, str] = {}
        self.exact: Callable[[], Any] = lambda: self.passes(definition, _wide(inputs))

    def passes(self, function: Function, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the result of a function of tensors, and the gradients of the leaves."""
        if self.seed is None:
            with torch.no_grad():
                return (function(*inputs.values()),)
        leaves = {name: inputs[name].detach().requires_grad_() for name in self.leaves}
        out = function(*(inputs | leaves).values())
        seed = self.seed.to(out.dtype)
        return (out, *torch.autograd.grad(out, [*leaves.values()], seed))

    def ours(self, function: Function, *names: str) -> None:
        """Add this library's function of arrays, by default of all inputs."""
        from unsloth_cupy import Tape

        used = {name: self.machine.ours(self.inputs[name]) for name in names or self.inputs}
        seed = self.machine.ours(self.seed)

        def call() -> tuple[Any, ...]:
            if seed is None:
                return (function(*used.values()),)
            tape = Tape()
            leaves = {name: tape.watch(used[name]) for name in self.leaves}
            out = function(*(used | leaves).values())
            return (out.value, *tape.gradients(out, [*leaves.values()], seed))

        self.calls[OURS] = call

    def torch(self, name: str, function: Function, *, compiled: bool = False) -> None:
        """Add a function of tensors, and what torch.compile makes of it on a GPU."""
        self.calls[name] = lambda: self.passes(function, self.inputs)
        if compiled and self.machine.on_gpu:
            fast = torch.compile(function, dynamic=False)
            self.calls[f"{name} compiled"] = lambda: self.passes(fast, self.inputs)

    def peer(self, name: str, make: Callable[[], Function]) -> None:
        """Add the function that ``make`` returns, or the reason why its library is missing."""
        try:
            self.torch(name, make())
        except Exception as error:  # foreign code
            self.notes[name] = f"left out: {_first(error)}"

    def run(self, say: Callable[..., None]) -> None:
        """Compare all results, and time those that agree."""
        expected, away = self.exact(), {}
        for name, call in self.calls.items():
            try:
                results = map(self.machine.tensor, call())
                away[name] = max(_away(a, b) for a, b in zip(results, expected, strict=True))
            except Exception as error:  # foreign code
                self.notes[name] = f"fails: {_first(error)}"
                continue
            if not away[name] < self.near:
                self.notes[name] = f"differs: {away.pop(name):.1e} of a norm"
        clock = Clock(self.machine)
        agreeing = {name: self.calls[name] for name in away}
        for name, (middle, *quartiles) in clock(agreeing).items():
            call = self.calls[name]
            say(
                contestant=name, seconds=middle, quartiles=quartiles, away=away[name],
                host=clock.host(call), bytes=held(self.machine, call), **self.counts,
            )  # fmt: skip
        for name, note in self.notes.items():
            say(contestant=name, note=note)


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with floats in float32."""
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}


def _away(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance as a share of the norm; inf if shapes differ or a value is not finite."""
    a, b = actual.detach().double().flatten(), expected.detach().double().flatten()
    if a.shape != b.shape or not torch.isfinite(a).all():
        return math.inf
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def rms_norm(m: Machine) -> Comparison:
    """Forward and backward of 8192 rows of 4096."""
    rows, hidden = (8192, 4096) if m.on_gpu else (64, 128)

    def definition(x: Any, weight: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    inputs = {"x": m.random(rows, hidden, seed=1), "weight": m.random(hidden, seed=2)}
    seed = m.random(rows, hidden, seed=3)
    op = Comparison(m, definition, inputs, *inputs, seed=seed, moved=10 * rows * hidden)
    own = of("unsloth_cupy", "rms_norm")
    op.ours(lambda x, weight: own(x, weight, eps=1e-6))
    op.torch("torch", definition, compiled=True)

    def liger() -> Function:
        norm = of("liger_kernel.transformers.functional", "liger_rms_norm")
        return lambda x, weight: norm(x, weight, 1e-6, 0.0, "llama", False)

    def unsloth() -> Function:  # without a gradient of its weight, which the comparison notes
        without_init("unsloth", "unsloth_zoo", "unsloth.kernels")
        norm = of("unsloth.kernels.rms_layernorm", "Fast_RMS_Layernorm")
        return lambda x, weight: norm.apply(x, weight, 1e-6, False)

    def quack() -> Function:
        norm = of("quack", "rmsnorm")
        return lambda x, weight: norm(x, weight, eps=1e-6)

    op.peer("liger", liger)
    op.peer("unsloth", unsloth)
    op.peer("quack", quack)
    return op


def swiglu(m: Machine) -> Comparison:
    """Forward and backward of 8192 rows of 14336."""
    rows, inner = (8192, 14336) if m.on_gpu else (64, 128)

    def definition(gate: Any, up: Any) -> Any:
        return F.silu(gate) * up

    inputs = {name: m.random(rows, inner, seed=n) for n, name in enumerate(("gate", "up"))}
    seed = m.random(rows, inner, seed=3)
    op = Comparison(m, definition, inputs, *inputs, seed=seed, moved=16 * rows * inner)
    op.ours(of("unsloth_cupy", "swiglu"))
    op.torch("torch", definition, compiled=True)
    op.peer("liger", lambda: of("liger_kernel.ops.swiglu", "LigerSiLUMulFunction").apply)
    return op


def head(m: Machine) -> tuple[dict[str, Any], float]:
    """Return the inputs of a head of Llama 3 8B for 8192 rows, and its operations."""
    rows, hidden, vocab = (8192, 4096, 128256) if m.on_gpu else (64, 32, 256)
    generator = torch.Generator(m.device).manual_seed(3)
    labels = torch.randint(0, vocab, (rows,), device=m.device, generator=generator)
    weight = m.random(vocab, hidden, scale=hidden**-0.5, seed=2)
    inputs = {"x": m.random(rows, hidden, seed=1), "weight": weight, "labels": labels}
    return inputs, 6.0 * rows * hidden * vocab


def linear_cross_entropy(m: Machine) -> Comparison:
    """The loss of a head and the gradients of both operands."""
    inputs, flops = head(m)

    def definition(x: Any, weight: Any, labels: Any) -> Any:
        parts = zip(x.split(1024), labels.split(1024), strict=True)
        losses = [F.cross_entropy((a @ weight.T).float(), b, reduction="sum") for a, b in parts]
        return torch.stack(losses).sum() / len(x)

    seed = torch.ones((), device=m.device)
    op = Comparison(m, definition, inputs, "x", "weight", seed=seed, flops=flops)
    own = of("unsloth_cupy", "linear_cross_entropy_gradients")
    arrays = {name: m.ours(value) for name, value in inputs.items()}

    def call(**options: Any) -> tuple[Any, ...]:
        loss, dx, dweight = own(**arrays, scale=1 / len(inputs["x"]), **options)
        return loss.mean(), dx, dweight

    op.calls[OURS] = call
    op.calls[f"{OURS}, chunks of 2 GiB"] = lambda: call(max_bytes=2 << 30)
    op.torch("torch, chunks of 1024 rows", definition)

    liger = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
    op.peer("liger", lambda: of(*liger))
    op.peer("cut-cross-entropy", lambda: of("cut_cross_entropy", "linear_cross_entropy"))
    return op


def log_probs(m: Machine) -> Comparison:
    """What GRPO computes: the log-probability of a token of each row; the head is frozen."""
    inputs, flops = head(m)

    def definition(x: Any, weight: Any, labels: Any) -> Any:
        parts = []
        for a, b in zip(x.split(1024), labels.split(1024), strict=True):
            logits = (a @ weight.T).float()
            parts.append(logits.gather(1, b[:, None])[:, 0] - logits.logsumexp(1))
        return torch.cat(parts)

    seed = m.random(len(inputs["x"]), seed=4).float()
    op = Comparison(m, definition, inputs, "x", seed=seed, flops=flops)
    own = of("unsloth_cupy", "linear_log_probs")
    op.ours(lambda x, weight, labels: own(x, weight, labels).log_probs)
    op.torch("torch, chunks of 1024 rows", definition)
    return op


def attention(m: Machine, dim: int, heads: int) -> Comparison:
    """Causal attention of 8192 tokens with a quarter of key heads, forward and backward."""
    tokens, heads, kv_heads = (8192, heads, heads // 4) if m.on_gpu else (64, 4, 2)
    dim = dim if m.on_gpu else 16

    def definition(q: Any, k: Any, v: Any) -> Any:
        lying = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*lying, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    inputs = {"q": m.random(1, tokens, heads, dim, seed=1)}
    inputs |= {name: m.random(1, tokens, kv_heads, dim, seed=n) for n, name in ((2, "k"), (3, "v"))}
    op = Comparison(
        m, definition, inputs, *inputs, seed=m.random(1, tokens, heads, dim, seed=4), near=NEARLY,
        flops=7.0 * tokens**2 * heads * dim,
    )  # fmt: skip
    own = of("unsloth_cupy", "attention")
    op.ours(lambda q, k, v: own(q, k, v, causal=True))
    backend = of("torch.nn.attention", "SDPBackend")
    used = of("torch.nn.attention", "sdpa_kernel")

    def by(kind: Any) -> Function:
        def run(q: Any, k: Any, v: Any) -> Any:
            with used(kind):
                return definition(q, k, v)

        return run

    kinds = {"cuDNN": backend.CUDNN_ATTENTION, "FlashAttention": backend.FLASH_ATTENTION}
    for name, kind in kinds.items() if m.on_gpu else [("math", backend.MATH)]:
        op.torch(f"torch, {name}", by(kind))

    def flash4() -> Function:
        run = of("flash_attn.cute", "flash_attn_func")
        return lambda q, k, v: run(q, k, v, causal=True)

    op.peer("flash-attn-4", flash4)
    return op


def attention_128(m: Machine) -> Comparison:
    """Attention with the heads of Llama 3 8B."""
    return attention(m, 128, 32)


def attention_64(m: Machine) -> Comparison:
    """Attention with heads of 64."""
    return attention(m, 64, 64)


def decode_attention(m: Machine) -> Comparison:
    """A token of each of 32 rows of 4096 keys: the cache is read once."""
    rows, keys, heads, kv_heads, dim = (32, 4096, 32, 8, 128) if m.on_gpu else (2, 64, 4, 2, 16)

    def definition(q: Any, k: Any, v: Any) -> Any:
        lying = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*lying, enable_gqa=True).transpose(1, 2)

    inputs = {"q": m.random(rows, 1, heads, dim, seed=1)}
    inputs |= {n: m.random(rows, keys, kv_heads, dim, seed=s) for s, n in ((2, "k"), (3, "v"))}
    moved = 4 * rows * keys * kv_heads * dim
    op = Comparison(m, definition, inputs, near=NEARLY, moved=moved)
    op.ours(of("unsloth_cupy", "attention"))
    op.torch("torch", definition)
    return op


def nf4(m: Machine, rows: int) -> Comparison:
    """The product of some rows and an NF4 weight, beside the product with its dense values."""
    outputs, columns = (14336, 4096) if m.on_gpu else (128, 64)
    w = m.random(outputs, columns, scale=0.02, seed=1)
    quantize, linear = of("unsloth_cupy", "nf4_quantize"), of("unsloth_cupy", "linear")
    weight = quantize(m.ours(w))
    dense = m.tensor(weight.dequantize()).to(m.dtype)

    def definition(x: Any, dense: Any) -> Any:
        return x @ dense.T

    inputs = {"x": m.random(rows, columns, seed=2), "dense": dense}
    work = {"moved": 9 * w.numel() // 16, "flops": 2.0 * rows * w.numel()}
    op = Comparison(m, definition, inputs, near=NEARLY, **work)
    op.ours(lambda x: linear(x, weight), "x")
    op.torch("torch, dense", definition)

    def bitsandbytes() -> Function:
        pack, multiply = (
            of("bitsandbytes.functional", "quantize_4bit"),
            of("bitsandbytes", "matmul_4bit"),
        )
        packed, state = pack(w, blocksize=64, quant_type="nf4")
        return lambda x, dense: multiply(x, packed.t(), quant_state=state)

    op.peer("bitsandbytes", bitsandbytes)
    return op


def nf4_1_row(m: Machine) -> Comparison:
    """A token of one sequence."""
    return nf4(m, 1)


def nf4_4096_rows(m: Machine) -> Comparison:
    """A batch of training."""
    return nf4(m, 4096 if m.on_gpu else 16)


def experts(m: Machine) -> Comparison:
    """8 of 128 experts of 768 for each of 8192 rows: a layer of Qwen3 30B-A3B."""
    rows, hidden, inner, count, k = (8192, 2048, 768, 128, 8) if m.on_gpu else (32, 16, 8, 4, 2)
    scores = m.random(rows, count, seed=1).float()
    chosen = scores.topk(k, 1).indices
    share = torch.softmax(m.random(rows, k, seed=2).float(), 1).to(m.dtype)

    def definition(x: Any, gate_up: Any, down: Any) -> Any:
        out = torch.zeros_like(x)
        for expert in range(count):
            row, place = torch.where(chosen == expert)
            gate, up = (x[row] @ gate_up[expert].T).chunk(2, -1)
            part = (F.silu(gate) * up) @ down[expert].T
            out.index_add_(0, row, part * share[row, place, None].to(x.dtype))
        return out

    inputs = {
        "x": m.random(rows, hidden, seed=3),
        "gate_up": m.random(count, 2 * inner, hidden, scale=hidden**-0.5, seed=4),
        "down": m.random(count, hidden, inner, scale=inner**-0.5, seed=5),
    }
    seed, flops = m.random(rows, hidden, seed=6), 18.0 * rows * k * hidden * inner
    op = Comparison(m, definition, inputs, *inputs, seed=seed, flops=flops)
    own, routes = of("unsloth_cupy", "experts_mlp"), of("unsloth_cupy", "Routes")
    own_routes = routes(m.ours(chosen), m.ours(share))
    op.ours(lambda x, gate_up, down: own(x, gate_up, down, own_routes))
    op.torch("torch, a loop", definition)
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=count).cumsum(0).to(torch.int32)

    def grouped(x: Any, gate_up: Any, down: Any) -> Any:
        gate, up = torch._grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
        return torch.zeros_like(x).index_add(0, order // k, y * share.flatten()[order, None])

    if m.on_gpu:
        op.torch("torch, grouped_mm", grouped)
    return op


def delta_rule(m: Machine) -> Comparison:
    """The gated delta rule of Qwen3-Next with as many key heads as value heads."""
    tokens, heads, dim = (8192, 32, 128) if m.on_gpu else (64, 2, 64)
    size = (1, tokens, heads, dim)
    q, k = (F.normalize(m.random(*size, seed=s).float(), dim=-1).to(m.dtype) for s in (1, 2))
    gates = torch.rand(2, 1, tokens, heads, generator=torch.Generator().manual_seed(3))
    g, beta = (each.to(m.device, m.dtype) for each in (-gates[0], gates[1]))
    inputs = {"q": q, "k": k, "v": m.random(*size, seed=4), "g": g, "beta": beta}
    own = of("unsloth_cupy", "gated_delta_rule")

    def definition(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        state, out = q.new_zeros(heads, dim, dim), []
        for t in range(q.shape[1]):
            state = state * g[0, t].exp()[:, None, None]
            u = beta[0, t][:, None] * (v[0, t] - torch.einsum("hd,hde->he", k[0, t], state))
            state = state + torch.einsum("hd,he->hde", k[0, t], u)
            out.append(torch.einsum("hd,hde->he", q[0, t], state) * dim**-0.5)
        return torch.stack(out)[None]

    op = Comparison(
        m, definition, inputs, "q", "k", "v", seed=m.random(*size, seed=5), near=NEARLY,
        moved=20 * tokens * heads * dim,
    )  # fmt: skip
    op.ours(lambda q, k, v, g, beta: own(q, k, v, g, beta)[0])
    if m.on_gpu:  # a loop over tokens takes minutes: the kernel in float32, which tests verify
        wide = Comparison(
            m, definition, _wide(inputs), *op.leaves, seed=m.random(*size, seed=5).float()
        )
        wide.ours(lambda q, k, v, g, beta: own(q, k, v, g, beta)[0])
        op.exact = lambda: tuple(map(m.tensor, wide.calls[OURS]()))
    else:
        op.torch("torch, a loop", definition)

    def fla() -> Function:
        chunk = of("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
        return lambda q, k, v, g, beta: chunk(q, k, v, g.float(), beta, scale=dim**-0.5)[0]

    op.peer("flash-linear-attention", fla)
    return op


def causal_conv(m: Machine) -> Comparison:
    """The convolution of a hybrid's layer with SiLU, forward and backward."""
    tokens, channels = (8192, 8192) if m.on_gpu else (64, 32)

    def definition(x: Any, weight: Any) -> Any:
        padded = F.pad(x.transpose(1, 2), (3, 0))
        return F.silu(F.conv1d(padded, weight[:, None], groups=channels)).transpose(1, 2)

    size = (1, tokens, channels)
    inputs = {"x": m.random(*size, seed=1), "weight": m.random(channels, 4, scale=0.5, seed=2)}
    seed = m.random(*size, seed=3)
    op = Comparison(m, definition, inputs, *inputs, seed=seed, moved=10 * tokens * channels)
    own = of("unsloth_cupy", "causal_conv")
    op.ours(lambda x, weight: own(x, weight)[0])
    op.torch("torch", definition, compiled=True)

    def fla() -> Function:
        convolve = of("fla.modules.convolution", "causal_conv1d")
        return lambda x, weight: convolve(x, weight, activation="silu")[0]

    op.peer("flash-linear-attention", fla)
    return op


def ssd(m: Machine) -> Comparison:
    """The scan of Mamba-2, forward."""
    tokens, heads, dim, state = (8192, 128, 64, 128) if m.on_gpu else (64, 2, 8, 16)
    inputs = {
        "x": m.random(1, tokens, heads, dim, seed=1),
        "dt": m.random(1, tokens, heads, seed=2),
        "a_log": m.random(heads, scale=0.5, seed=3).float(),
        "b": m.random(1, tokens, 1, state, scale=0.3, seed=4),
        "c": m.random(1, tokens, 1, state, scale=0.3, seed=5),
    }

    def definition(x: Any, dt: Any, a_log: Any, b: Any, c: Any) -> Any:
        h, out = x.new_zeros(heads, dim, state), []
        for t in range(tokens):
            step = F.softplus(dt[0, t])
            decay = torch.exp(-a_log.exp() * step)[:, None, None]
            h = h * decay + (step[:, None] * x[0, t])[..., None] * b[0, t, 0]
            out.append(h @ c[0, t, 0])
        return torch.stack(out)[None]

    op = Comparison(m, definition, inputs, near=NEARLY, moved=4 * tokens * heads * dim)
    own = of("unsloth_cupy", "ssd")
    op.ours(lambda x, dt, a_log, b, c: own(x, dt, a_log, b, c)[0])

    def mamba() -> Function:
        without_init("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
        scan = of("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
        return lambda x, dt, a_log, b, c: scan(x, dt, -a_log.exp(), b, c, 256, dt_softplus=True)

    op.peer("mamba-ssm", mamba)
    if not m.on_gpu:
        op.torch("torch, a loop", definition)
    return op
