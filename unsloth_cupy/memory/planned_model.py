"""Creates a model and its optimizer with planned arrays, in their state before a training step."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.dtypes import FLOAT32
from ..errors import ConfigError
from ..training.checkpoint import CheckpointConfig
from ..training.joined import Joined
from ..training.optimizer import Optimizer
from ..training.precision import compute_copies
from .ledger import MASTER, OPTIMIZER, ROLLOUTS, WEIGHTS, Ledger
from .planned import Planned, PlannedOnHost, recording_in

if TYPE_CHECKING:
    from ..models import Transformer
    from ..models.adapters.adapter import Adapter
    from ..models.configs.config import Config

# class of arrays, and the granularity of allocations: CuPy's pool rounds to 512 bytes
DEVICES: Mapping[str, tuple[Any, int]] = {"cuda": (Planned, 512), "cpu": (PlannedOnHost, 1)}


def new_adapter(
    config: "Config",
    rank: int,
    *,
    targets: Collection[str] | None = None,
    dora: bool = False,
    dropout: float = 0.0,
    tokens: Any = (),
    modules: Collection[str] = (),
    **unsized: Any,
) -> "Adapter":
    """Return planned adapters of linear layers, which are not counted yet.

    The options are those of ``models.create_adapter``; ``unsized`` options do not change a size.
    """
    from ..models.adapters.adapter import (
        DOWN,
        MAGNITUDE,
        PREFIX,
        TABLES,
        UP,
        Adapter,
        linear_layers,
    )
    from ..models.adapters.adapter_stacks import stacks_of, targets_of
    from ..models.adapters.outer_weights import (
        LOW_RANK,
        OUTER,
        TOKENS,
        check_outer,
        listed_tokens,
        rows_name,
    )
    from ..models.configs.names import TABLE

    parameters, shapes = {}, config.shapes()
    ids = listed_tokens("plan(tokens=)", tokens)
    check_outer("plan", config, ids, modules)
    with recording_in(Ledger(1)):
        for table, of in ids.items():
            parameters[rows_name(table)] = Planned.of((len(of), config.hidden), FLOAT32)
        for table in (OUTER[each][0] for each in TABLES if each in (targets or ())):
            vocab, hidden = shapes[table]
            down, up = LOW_RANK[table]
            sides = (vocab, hidden) if table == TABLE else (hidden, vocab)
            parameters[down] = Planned.of((rank, sides[0]), FLOAT32)
            parameters[up] = Planned.of((sides[1], rank), FLOAT32)
        for outer in (each for module in modules for each in OUTER[module] if each in shapes):
            parameters[PREFIX + outer] = Planned.of(shapes[outer], FLOAT32)
        for name, (outputs, inputs) in linear_layers(config).items():
            if targets is not None and name.rpartition(".")[2] not in targets:
                continue
            parameters[f"{PREFIX}{name}.{DOWN}"] = Planned.of((rank, inputs), FLOAT32)
            parameters[f"{PREFIX}{name}.{UP}"] = Planned.of((outputs, rank), FLOAT32)
            if dora:
                parameters[f"{PREFIX}{name}.{MAGNITUDE}"] = Planned.of((outputs,), FLOAT32)
        ends = tuple(targets_of(config) if targets is None else {*targets} & {*targets_of(config)})
        stacks = stacks_of(config, lambda name: name.endswith(ends))
        for module, stack in stacks.items():
            count, outputs, inputs = stack.shape
            parameters[f"{PREFIX}{module}.{DOWN}"] = Planned.of((rank * count, inputs), FLOAT32)
            parameters[f"{PREFIX}{module}.{UP}"] = Planned.of((outputs, rank * count), FLOAT32)
    settings = {"r": rank, "lora_dropout": dropout, TOKENS: tokens}
    return Adapter(settings, parameters, stacks=stacks)


def with_planned_models(
    ledger: "Ledger", objective: Any, arrays: Any, kind: Any, here: bool = True
) -> Any:
    """Return an objective with planned models; count their weights if they are ``here``.

    ``objective.planned(create)`` returns the objective with ``create(config)`` for each model.
    """
    from ..models.transformer import Transformer

    def create(config: "Config") -> "Transformer | None":
        if not here:
            return None
        shapes = config.shapes().items()
        weights = {name: arrays.of(shape, config.dtype_of(name, kind)) for name, shape in shapes}
        ledger.enter(WEIGHTS, weights)
        return Transformer(config, weights, {})

    return objective.planned(create) if hasattr(objective, "planned") else objective


def rehearse(
    ledger: "Ledger", objective: Any, model: "Transformer", rows: int, tokens: int
) -> None:
    """Run the work that the objective does before the passes of a step, such as sampling."""
    if hasattr(objective, "rehearse"):
        objective.rehearse(model, rows, tokens)
        ledger.note(ROLLOUTS)


def planned_training(
    ledger: "Ledger",
    config: "Config",
    arrays: Any,
    kind: Any,
    optimizer: str,
    state_bits: int,
    adapter: "Adapter | None",
    codes: Callable[[str, Any], Any] | None,
    shapes: Mapping[str, Any] | None = None,
    ranks: Any = None,
    mtp_weight: float = 0.0,
) -> "tuple[Transformer, Optimizer | Joined | None]":
    """Return a model in its state before a step, and its optimizer.

    ``shapes`` are the shapes of a part of the model; ``ranks`` divide the parameters by Zero3.
    """
    from ..models.optimizers import optimizer_of
    from ..models.transformer import Transformer
    from ..parallel.zero3 import Zero3

    def created(
        shapes: Mapping[str, Any], *, narrow: bool, all_axes: bool = False
    ) -> dict[str, Any]:
        def of(name: str, shape: Any) -> Any:
            narrows = narrow and (all_axes or len(shape) > 1)
            return arrays.of(shape, config.dtype_of(name, kind) if narrows else FLOAT32)

        return {name: of(name, shape) for name, shape in shapes.items()}

    trains_all = adapter is None and optimizer != "none"
    all_shapes = config.shapes() if shapes is None else shapes
    parameters = created(all_shapes, narrow=not trains_all, all_axes=optimizer == "none")
    if codes is not None:
        for name in parameters:
            parameters[name] = codes(name, parameters[name])
    model = Transformer(config, parameters, {})
    model.mtp_weight = mtp_weight
    parts = None if ranks is None else Zero3(model, ranks)
    parameters = model.parameters
    ledger.enter(WEIGHTS, parameters)
    if adapter is not None:
        shapes = {name: array.shape for name, array in adapter.parameters.items()}
        model.adapter = adapter.holding(created(shapes, narrow=False))
        ledger.enter(WEIGHTS, model.adapter.parameters)
        ledger.enter(WEIGHTS, model.adapter.file_weights(parameters))
    if optimizer == "none":
        return model, None
    steps = optimizer_of(optimizer, model, state_bits=state_bits)
    ledger.enter(OPTIMIZER, steps.state())
    if trains_all:
        copies = (
            compute_copies(model.narrowed(kind), kind.name)
            if parts is None
            else parts.compute_copies(kind.name)
        )
        ledger.enter(MASTER, {name: parameters[name] for name in copies})
        ledger.enter(WEIGHTS, copies)
        steps.keep_copies(copies)
        model.parameters = parameters | copies
    return model, steps


def segments(
    call: str, recompute_every: int | CheckpointConfig | None, *, offload: bool, device: str
) -> CheckpointConfig | None:
    """Return the settings of gradient checkpointing; None: nothing is recomputed."""
    every = recompute_every
    parts = every if isinstance(every, CheckpointConfig | None) else CheckpointConfig(True, every)
    if parts is None and offload:
        cure = "it moves the inputs of recomputed blocks: pass recompute_every too"
        raise ConfigError(f"{call}(offload=True): {cure}")
    if offload and device == "cpu":
        cure = "arrays are in the memory of the host already: leave it out, or plan for cuda"
        raise ConfigError(f"{call}(offload=True, device='cpu'): {cure}")
    return replace(parts, offload=True) if parts is not None and offload else parts
