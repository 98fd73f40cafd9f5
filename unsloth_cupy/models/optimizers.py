"""The table of optimizers that a run can name, and functions that create them for a model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..training.adafactor import Adafactor
from ..training.adamw import AdamW
from ..training.joined import Joined
from ..training.lion import Lion
from ..training.muon import Muon
from ..training.optimizer import Optimizer
from ..training.schedule_free import ScheduleFreeAdamW
from .adapters.adapter import DOWN
from .configs.config import Config
from .configs.names import ADAPTED, SCORE, is_norm, is_router
from .quantizer import left_dense
from .ranks.pipeline_stages import EMBEDDING, HEAD

BETAS = (0.9, 0.95)  # a run is short: with 0.999 the second moment would average 1000 steps


@dataclass(frozen=True)
class Kind:
    """One optimizer that a run can name.

    ``rates`` are the default learning rates of weights and of adapters, as multiples of AdamW's.
    ``undivided`` has the parallel settings that it cannot be combined with, each with a reason.
    """

    create: Callable[..., Optimizer | Joined]
    rates: tuple[float, float] = (1.0, 1.0)
    decay: str = "cosine"  # default schedule of the learning rate
    constant: bool = False  # no other ``decay`` is allowed: it averages steps at a constant rate
    small: bool = False  # moments may have 8 bits, and data ranks may divide them
    undivided: Mapping[str, str] = field(default_factory=dict)


def _muon(model: Any, parameters: dict[str, Any], **options: Any) -> Optimizer | Joined:
    """Return Muon for the linear maps of blocks, joined with AdamW for all other parameters."""
    adapted = () if model.adapter is None else model.adapter.stacks.values()
    stacked = {name for each in adapted for name in (each.down, each.up)}
    matrices = {n: p for n, p in parameters.items() if n not in stacked and _is_linear(n, p.shape)}
    rows = {n: _rows(n, len(p), model.config) for n, p in matrices.items()}
    parts = {n: each for n, each in rows.items() if each}
    groups = options.pop("groups")
    muon = Muon(
        matrices, adjust="match_rms_adamw", parts=parts, groups=groups(matrices),
        **{name: options[name] for name in ("lr", "weight_decay")},
    )  # fmt: skip
    others = {n: p for n, p in parameters.items() if n not in matrices}
    adamw = _adamw(model, others, groups=groups, **options)
    return Joined([muon, adamw])


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is the matrix of a linear layer in a block, or of its adapter.

    Muon trains routers too, as in Moonlight and Megatron-LM; it trains no embedding and no head.
    """
    own = name.removeprefix(ADAPTED)
    return len(shape) == 2 and (is_router(own) or not left_dense(own, shape, skip=(), least=0))


def _adamw(_: Any, parameters: dict[str, Any], **options: Any) -> AdamW:
    options["groups"] = options["groups"](parameters)
    whole = [*of_tables(parameters), *(parameters.keys() & {SCORE})]
    return AdamW(parameters, betas=BETAS, whole=whole, **options)


def _plain(kind: Callable[..., Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    """Return a function that creates one optimizer for all parameters."""

    def create(_: Any, parameters: dict[str, Any], **options: Any) -> Optimizer:
        del options["state_bits"]  # always 32: see ``conflict``
        options["groups"] = options["groups"](parameters)
        return kind(parameters, **fixed, **options)

    return create


MATRICES = {"tensor_parallel": "its steps need whole matrices"}
STACKS = {"expert_parallel": "its steps need whole stacks of experts"}
OPTIMIZERS: Mapping[str, Kind] = {
    "adamw": Kind(_adamw, small=True),
    "muon": Kind(_muon, undivided=MATRICES),
    # a rate is relative to the size of a weight, and B of an adapter is 0 at first
    "adafactor": Kind(_plain(Adafactor), rates=(10.0, 300.0), undivided=MATRICES | STACKS),
    "lion": Kind(_plain(Lion), rates=(0.3, 0.3)),
    "schedulefree": Kind(
        _plain(ScheduleFreeAdamW, betas=BETAS),
        rates=(2.5, 2.5),
        decay="constant",
        constant=True,
    ),
}


def undecayed(model: Any) -> list[str]:
    """Return the trainable parameters without weight decay.

    These are norms, biases, embeddings, and the decay rates of states (A_log).
    """
    whole = model.config if model.division is None else model.division.whole
    shapes: Mapping[str, Any] = whole.shapes()  # of whole arrays: ranks may store flat parts
    axes = {n: len(shapes.get(n, array.shape)) for n, array in model.trainable.items()}
    words = "embed_tokens", ".embeddings."
    return [
        name
        for name, count in axes.items()
        if count < 2
        or is_norm(name)
        or name.endswith(("_bias", "A_log"))
        or any(word in name for word in words)
    ]


def optimizer_of(
    name: str,
    model: Any,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    state_bits: int = 32,
    undecayed: Collection[str] = (),
    embedding_lr: float | None = None,
) -> Optimizer | Joined:
    """Return an optimizer of a model's trainable parameters.

    Parameters in ``undecayed`` have no weight decay.  ``embedding_lr`` is the learning rate of the
    embedding table and of the head, and of an adapter's weights for them.  Their moments, and the
    moments of a classifier's head, always have 32 bits: tokens that are not in a batch have rows of
    zeros in the gradients.

    Muon trains the matrices of linear layers in blocks, with AdamW's learning rate and weight
    decay.  AdamW trains the rest, which includes tables, heads, stacks of experts, and their
    adapters.
    """

    def groups(parameters: Collection[str]) -> list[dict[str, Any]]:
        return _groups(parameters, undecayed, embedding_lr)

    options = {"lr": lr, "weight_decay": weight_decay, "state_bits": state_bits, "groups": groups}
    return OPTIMIZERS[name].create(model, dict(model.trainable), **options)


def conflict(
    optimizer: str, *, state_bits: int = 32, zero: int = 0, **ranks: int
) -> tuple[dict[str, Any], str] | None:
    """Return a setting that conflicts with the optimizer, and the reason; None without conflict."""
    kind = OPTIMIZERS.get(optimizer)
    if kind is None or kind.small:
        return None
    if state_bits != 32:
        return {"state_bits": state_bits}, "only AdamW has moments of 8 bits"
    if zero:
        return {"zero": zero}, "data ranks divide the moments of AdamW only"
    for setting, why in kind.undivided.items():
        if ranks.get(setting, 1) > 1:
            return {setting: ranks[setting]}, why
    return None


def of_tables(names: Iterable[str]) -> list[str]:
    """Return the names that belong to the embedding table or to the head."""
    modules = (f".{EMBEDDING}".removesuffix("weight"), f".{HEAD}".removesuffix("weight"))
    return [name for name in names if any(module in f".{name}" for module in modules)]


def _groups(
    parameters: Collection[str], undecayed: Collection[str], embedding_lr: float | None
) -> list[dict[str, Any]]:
    """Return the parameter groups that have no weight decay, or their own learning rate."""
    tables = {} if embedding_lr is None else {"lr": embedding_lr}
    of_own_rate = {*of_tables(parameters)} if tables else set()
    groups = []
    for rate, members in ((tables, of_own_rate), ({}, {*parameters} - of_own_rate)):
        for decay in ({"weight_decay": 0.0}, {}):
            names = [n for n in parameters if n in members and (n in undecayed) == bool(decay)]
            if names and (rate or decay):
                groups.append({"names": names, **rate, **decay})
    return groups


def _rows(name: str, rows: int, config: Config) -> tuple[int, ...]:
    """Return the number of rows of each matrix in a fused weight, or in the B of its adapter."""
    if name.endswith(DOWN):
        return ()
    if "qkv" in config.fused and f".{config.names.qkv}." in name:
        keys = config.kv_heads * config.dim
        return config.heads * config.dim, keys, keys
    fused = "mlp" in config.fused and f".{config.names.gate_up}." in name
    return (rows // 2, rows // 2) if fused else ()
