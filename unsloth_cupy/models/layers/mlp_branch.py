"""The MLP branch of a block: dense, or a mixture of experts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...ops.activations.geglu import geglu
from ...ops.activations.relu2 import relu2
from ...ops.activations.swiglu import swiglu
from ...ops.activations.xielu import xielu
from ...ops.elements.arithmetic import add, multiply, scale
from ...ops.norms.rms_norm import rms_norm
from ...training.chunks import chunk_of, in_chunks
from ..configs.config import BUFFERS
from .call import Call, parameters_of
from .elements import gated, gelu, split
from .experts_layer import experts_of_tokens
from .norms import divided_norm, norm_of


def mlp_branch(call: Call, layer: int, prefix: str, x: Any, unread: bool = False) -> Any:
    """Return the output of a dense MLP or of a mixture of experts for normalised x.

    ``unread``: see ``in_chunks``.
    """
    experts = call.config.experts
    dense = experts is None or not experts.sparse[layer] or experts.beside or experts.shortcut
    if experts is None or dense:
        return _dense_mlp(call, f"{prefix}{call.config.mlp_in(layer)}", x, unread)
    module = prefix + experts.prefix
    y = experts_of_tokens(call, layer, module, x, unread and not experts.shared)
    if not experts.shared:
        return y
    shared = _dense_mlp(call, f"{prefix}{experts.shared_module}.", x)
    if experts.shared_gate:
        (gate,) = call.project(call.parameters, [f"{prefix}{experts.shared_module}_gate"], x)
        shared = gated(shared, gate)
    return add(y, shared)


def mlp_and_experts(call: Call, layer: int, prefix: str, x: Any, stream: Any) -> Any:
    """Return the sum of a dense MLP of normalised x and of experts of the residual stream h.

    norm(mlp(x)) + norm(experts(norm(h)))       the router reads h / rms(h) * scale
    """
    config, experts, norms = call.config, call.config.experts, call.config.norms
    dense = mlp_branch(call, layer, prefix, x)
    if experts is None or not experts.sparse[layer]:
        return dense
    factors = scale(call.parameters[f"{prefix}router.scale"], factor=config.hidden**-0.5)
    of_router = rms_norm(stream, factors, eps=config.eps)
    y = norm_of(call, prefix, f"{norms.before_mlp}_2", stream)
    y = experts_of_tokens(call, layer, prefix + experts.prefix, y, of_router=of_router)
    dense = norm_of(call, prefix, f"{norms.after_mlp}_1", dense)
    return add(dense, norm_of(call, prefix, f"{norms.after_mlp}_2", y))


def _dense_mlp(call: Call, module: str, x: Any, unread: bool = False) -> Any:
    """Return the output of a dense MLP for normalised x, by chunks of rows where they are many."""
    parameters = parameters_of(call, module)
    inner = parameters[f"{module}{call.config.names.down}.weight"].shape[-1]
    size = chunk_of(call.chunked_mlp, x, parameters.values(), inner)
    if size is None:
        return _of_rows(call, module, x)

    def of_part(parameters: Mapping[str, Any], part: slice, rows: Sequence[Any]) -> Any:
        project = partial(call.project, part=part)
        return _of_rows(call._replace(parameters=parameters, project=project), module, *rows)

    return in_chunks(of_part, [x], parameters, size, unread=unread)


def _of_rows(call: Call, module: str, x: Any) -> Any:
    """Return the output of a dense MLP for rows of normalised x."""
    config, names, parameters = call.config, call.config.names, call.parameters
    if "mlp" in config.fused:
        (fused,) = call.project(parameters, [module + names.gate_up], x)
        inner = fused.shape[-1] // 2
        gate, up = split(fused, (inner, inner))
    elif config.gate:
        gate, up = call.project(parameters, [module + names.gate, module + names.up], x)
    else:
        (gate,) = call.project(parameters, [module + names.up], x)
    if config.gate_scale != 1:
        gate = scale(gate, factor=config.gate_scale)
    match config.activation:
        case "silu":
            y = swiglu(gate, up)
        case "relu2":
            y = multiply(relu2(gate), up) if config.gate else relu2(gate)
        case "xielu":
            parts = ("alpha_p", "alpha_n", *BUFFERS)
            y = xielu(gate, *(parameters[f"{module}act_fn.{part}"] for part in parts))
        case name if config.gate:
            y = geglu(gate, up, approximate=name == "gelu_tanh")
        case name:
            y = gelu(gate, approximate=name == "gelu_tanh")
    if config.sub_norms:
        y = divided_norm(call, module, "ffn_sub_norm", y)
    (y,) = call.project(parameters, [module + names.down], y)
    return y if config.down_scale == 1 else scale(y, factor=config.down_scale)
