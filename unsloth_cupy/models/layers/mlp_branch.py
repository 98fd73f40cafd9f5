"""The MLP branch of a block: dense, or a mixture of experts."""

from typing import Any

from ...errors import ConfigError
from ...ops.activations.geglu import geglu
from ...ops.activations.relu2 import relu2
from ...ops.activations.swiglu import swiglu
from ...ops.activations.swiglu_mlp import swiglu_mlp
from ...ops.activations.xielu import xielu
from ...ops.elements.arithmetic import add, multiply, scale
from ..adapters.adapter import Adapter
from ..configs.config import BUFFERS, Config
from .call import Call
from .elements import gated, gelu, split
from .experts_layer import experts_of_tokens
from .norms import divided_norm


def mlp_branch(call: Call, layer: int, prefix: str, x: Any) -> Any:
    """Return the output of a dense MLP or of a mixture of experts for normalised x."""
    experts = call.config.experts
    if experts is None or not experts.sparse[layer]:
        return _dense_mlp(call, f"{prefix}{call.config.names.mlp}.", x)
    module = f"{prefix}{experts.module}."
    y = experts_of_tokens(call, layer, module, x)
    if not experts.shared:
        return y
    shared = _dense_mlp(call, f"{prefix}{experts.shared_module}.", x)
    if experts.shared_gate:
        (gate,) = call.project(call.parameters, [f"{prefix}{experts.shared_module}_gate"], x)
        shared = gated(shared, gate)
    return add(y, shared)


def _dense_mlp(call: Call, module: str, x: Any) -> Any:
    """Return the output of a dense MLP for normalised x."""
    config, names, parameters = call.config, call.config.names, call.parameters
    if call.chunked_mlp:
        return swiglu_mlp(x, *_mlp_weights(call, module))
    if "mlp" in config.fused:
        (fused,) = call.project(parameters, [module + names.gate_up], x)
        inner = fused.shape[-1] // 2
        gate, up = split(fused, (inner, inner))
    elif config.gate:
        gate, up = call.project(parameters, [module + "gate_proj", module + names.up], x)
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


def _mlp_weights(call: Call, module: str) -> tuple[Any, Any, Any]:
    """Return the weights of gate, up and down; fused checkpoints store gate and up together."""
    config, parameters = call.config, call.parameters
    down = parameters[f"{module}{config.names.down}.weight"]
    if "mlp" not in config.fused:
        up = parameters[f"{module}{config.names.up}.weight"]
        return parameters[module + "gate_proj.weight"], up, down
    shape, size = (config.inner, config.hidden), config.inner * config.hidden
    # (1, 2 * inner * hidden): a tape can only slice the last axis
    fused = parameters[f"{module}{config.names.gate_up}.weight"].reshape(1, -1)
    return fused[..., :size].reshape(*shape), fused[..., size:].reshape(*shape), down


def check_chunked(config: Config, adapter: Adapter | None) -> None:
    """Raise a ConfigError unless ``swiglu_mlp`` can compute the MLPs of this model."""
    adapted = (
        []
        if adapter is None
        else [name for name in adapter.scales if f".{config.names.mlp}." in name]
    )
    kind = f"the MLP of a {config.model_type} model"
    if config.experts is not None:
        problem = f"{kind} has experts"
    elif config.bit_layers:
        problem = f"{kind} rounds its weights as BitNet does"
    elif not config.gate:
        problem = f"{kind} has no gate"
    elif config.activation != "silu":
        problem = f"{kind} has the activation {config.activation}, not silu"
    elif (config.gate_scale, config.down_scale) != (1, 1):
        problem = f"{kind} multiplies its gate or its output"
    elif config.sub_norms or config.mlp_bias:
        problem = f"{kind} has {'a norm' if config.sub_norms else 'biases'} inside"
    elif adapted:
        problem = f"there is an adapter on {adapted[0]}, inside the MLP"
    else:
        return
    raise ConfigError(
        f"chunked_mlp: {problem}, which swiglu_mlp does not compute; leave it out, and checkpoint"
        " every block instead"
    )
