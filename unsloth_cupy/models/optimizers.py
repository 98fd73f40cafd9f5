"""The optimizer of a model by its name, and what it cannot be combined with."""

from collections.abc import Collection, Iterable
from typing import Any

from ..training.adafactor import Adafactor
from ..training.adamw import AdamW
from ..training.joined import Joined
from ..training.lion import Lion
from ..training.muon import Muon
from ..training.optimizer import Optimizer
from ..training.schedule_free import ScheduleFreeAdamW
from .configs.config import Config
from .configs.names import SCORE
from .ranks.pipeline_stages import EMBEDDING, HEAD

OPTIMIZERS = ("adamw", "muon", "adafactor", "lion", "schedulefree")
WHOLE = ("muon", "adafactor")  # a step needs whole matrices
BETAS = (0.9, 0.95)  # a run is short: the second moment must decay faster than by 0.999


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
    """Return an optimizer of what a model trains; parameters in ``undecayed`` do not decay.

    ``embedding_lr`` is the rate of the table of tokens and of the head, and of what an adapter has
    of them.  Their averages, and those of a classifier's head, have 32 bits: tokens that a batch
    does not have leave rows of zeros in their gradients.

    Muon has the matrices other than the embedding and the head, with AdamW's rate and decay, and
    AdamW the rest: also stacks of experts, and what adapters have of those.
    """
    parameters, made = dict(model.trainable), list[Optimizer]()
    if name == "muon":
        adapted = () if model.adapter is None else model.adapter.stacks.values()
        stacked = {name for each in adapted for name in (each.down, each.up)}
        inner = parameters.keys() - {EMBEDDING, HEAD, *stacked}
        matrices = {n: p for n, p in parameters.items() if p.ndim == 2 and n in inner}
        rows = {n: _rows(n, model.config) for n in matrices}
        parts = {n: each for n, each in rows.items() if sum(each) == len(matrices[n])}
        muon = Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust="match_rms_adamw", parts=parts,
            groups=_groups(matrices, undecayed, embedding_lr),
        )  # fmt: skip
        made.append(muon)
        parameters = {n: p for n, p in parameters.items() if n not in matrices}
    groups = _groups(parameters, undecayed, embedding_lr)
    shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "groups": groups}
    match name:
        case "adafactor":
            return Adafactor(parameters, **shared)
        case "lion":
            return Lion(parameters, **shared)
        case "schedulefree":
            return ScheduleFreeAdamW(parameters, betas=BETAS, **shared)
    whole = [*of_tables(parameters), *(parameters.keys() & {SCORE})]
    made.append(AdamW(parameters, betas=BETAS, state_bits=state_bits, whole=whole, **shared))
    return made[0] if len(made) == 1 else Joined(made)


def conflict(
    optimizer: str,
    *,
    state_bits: int = 32,
    tensor_parallel: int = 1,
    zero: int = 0,
    expert_parallel: int = 1,
) -> tuple[dict[str, Any], str] | None:
    """Return settings that an optimizer cannot be combined with, and why; None if it can."""
    if optimizer not in OPTIMIZERS[1:]:
        return None
    if state_bits != 32:
        return {"state_bits": state_bits}, "AdamW alone has averages of 8 bits"
    if zero:
        return {"zero": zero}, "data ranks divide the averages of AdamW alone"
    if tensor_parallel > 1 and optimizer in WHOLE:
        return {"tensor_parallel": tensor_parallel}, "its steps need whole matrices"
    if expert_parallel > 1 and optimizer == "adafactor":
        return {"expert_parallel": expert_parallel}, "its steps need whole stacks of experts"
    return None


def of_tables(names: Iterable[str]) -> list[str]:
    """Return those of some names that are of the table of tokens or of the head."""
    modules = (f".{EMBEDDING}".removesuffix("weight"), f".{HEAD}".removesuffix("weight"))
    return [name for name in names if any(module in f".{name}" for module in modules)]


def _groups(
    parameters: Collection[str], undecayed: Collection[str], embedding_lr: float | None
) -> list[dict[str, Any]]:
    """Return the groups of parameters that do not decay, or have a rate of their own."""
    tables = {} if embedding_lr is None else {"lr": embedding_lr}
    of_own_rate = {*of_tables(parameters)} if tables else set()
    groups = []
    for rate, members in ((tables, of_own_rate), ({}, {*parameters} - of_own_rate)):
        for decay in ({"weight_decay": 0.0}, {}):
            names = [n for n in parameters if n in members and (n in undecayed) == bool(decay)]
            if names and (rate or decay):
                groups.append({"names": names, **rate, **decay})
    return groups


def _rows(name: str, config: Config) -> tuple[int, ...]:
    """Return the rows of the matrices that a weight, or the B of its adapter, stores as one."""
    keys = config.kv_heads * config.dim
    if ".qkv_proj." in name:
        return config.heads * config.dim, keys, keys
    return (config.inner, config.inner) if ".gate_up_proj." in name else ()
