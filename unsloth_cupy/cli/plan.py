"""``unsloth-cupy plan``: plans the memory of a training step without allocating it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import machine
from ..errors import ConfigError
from ..finetune.methods.registry import METHODS
from ..finetune.naming import named
from ..finetune.planning.choices import fit
from ..finetune.run.limit import quantized_kind, tokens_of
from ..finetune.run.ranks import check_options, chunks_of
from ..finetune.run.reference import folder_of, with_teacher
from ..finetune.run.run_folder import config_file, model_folder, model_without_weights
from ..finetune.run.settings import Settings, check_optimizer
from ..memory.ledger import MemoryPlan
from ..memory.plan import plan_memory
from ..memory.planned_model import DEVICES
from ..memory.stage_plan import Layout, plan_ranks
from ..models.adapters.into import CHOICES
from ..models.gguf.opening import source_of
from ..models.objective import next_token
from ..models.optimizers import OPTIMIZERS
from ..profiling.cards import card_named
from .options import (
    ATTENTION,
    FILE,
    QUANTIZE,
    SCHEDULE,
    ZERO,
    Integer,
    NewPicture,
    Size,
    data_of,
    json_option,
    option,
)
from .plan_tables import (
    GB,
    cards,
    ledger,
    of_stages,
    options_text,
    show_fits,
    show_rollouts,
    training_methods,
)
from .timeline import draw_timeline

RANK = 16  # LoRA rank in the comparison table, unless --lora sets one


@click.command()
@click.argument("config", type=FILE)
@option("--batch", Integer(1), "Batch size in rows.", 1)
@option(
    "--tokens",
    Integer(1),
    "Length of a row in tokens.  [default: 2048, or all positions of the model if fewer]",
)
@option("--dtype", click.Choice(["float16", "bfloat16", "float32"]), "Compute dtype.", "bfloat16")
@option(
    "--optimizer",
    click.Choice([*OPTIMIZERS, "none"]),
    "Optimizer.  none: only the forward and the backward pass.",
    "adamw",
)
@option("--state-bits", click.Choice(["32", "8"]), "Bits per value of the optimizer states.", "32")
@option(
    "--method",
    click.Choice([*METHODS]),
    "Training method; for methods that train on pairs, a row is a pair of texts.",
    "sft",
)
@option("--teacher", FILE, "distill: folder of the teacher model.")
@option(
    "--samples",
    Integer(2),
    "grpo and rloo: number of answers per prompt; each answer is a row.",
)
@option(
    "--max-new-tokens",
    Integer(1),
    "grpo and rloo: maximum number of new tokens per answer; --tokens includes them.",
)
@click.option(
    "--reward",
    multiple=True,
    help="grpo and rloo: reward of the answers; only a reward model needs memory.",
)
@option("--lora", Integer(1), "LoRA rank: train adapters of this rank and freeze the model.")
@option("--quantize", QUANTIZE, "Quantize the frozen weights; requires --lora.")
@option(
    "--merge-into",
    click.Choice(CHOICES, case_sensitive=False),
    "Type of the quantized file into which the adapter will be merged.",
)
@option(
    "--recompute-every",
    Integer(1),
    "Gradient checkpointing: store only the input of every Nth block.",
)
@click.option(
    "--offload", is_flag=True,
    help="Store the inputs of recomputed blocks in host memory; requires --recompute-every.",
)  # fmt: skip
@click.option(
    "--chunked-mlp/--no-chunked-mlp", default=None,
    help="Compute MLPs and experts in chunks of tokens.  [default: in recomputed blocks with"
    " more tokens than one chunk]",
)  # fmt: skip
@option("--accumulate", Integer(1), "Gradient accumulation: number of batches per step.", 1)
@option(
    "--device",
    str,
    "cuda, the name of a card such as rtx4090, or cpu for the memory that NumPy needs.",
    "cuda",
)
@click.option(
    "--fit", "fitting", is_flag=True,
    help="Find settings with which a step fits into the memory of the card: the fastest ones, the"
    " ones for the longest row, and the ones with the least memory.  Options that you pass are"
    " kept.",
)  # fmt: skip
@click.option(
    "--data", multiple=True, metavar="PATH...",
    help="Training data, from which --fit takes the length of rows and the number of steps.",
)  # fmt: skip
@option(
    "--host-memory", Size(),
    "Limit on the host memory that --offload uses, for --fit.  [default: 80 % of the free memory]",
)  # fmt: skip
@option("--tensor-parallel", Integer(1), "Number of ranks that split each weight.")
@option("--pipeline-parallel", Integer(1), "Number of ranks that split the layers.")
@option("--data-parallel", Integer(1), "Number of ranks that process different rows.")
@option("--context-parallel", Integer(1), "Number of ranks that split the tokens of each row.")
@option("--expert-parallel", Integer(1), "Number of ranks that split the experts and the rows.")
@option(
    "--context-attention",
    ATTENTION,
    "Attention across context ranks; ulysses splits heads.  [default: ring]",
)
@option("--pipeline-schedule", SCHEDULE, "Pipeline schedule.  [default: 1f1b]")
@option(
    "--chunks",
    Integer(1),
    "Number of model parts per stage in the interleaved schedule.  [default: 2]",
)
@option(
    "--zero", ZERO, "ZeRO stage: 1 splits optimizer states over data ranks; 3 also splits weights.",
    "0",
)  # fmt: skip
@option("--plot", NewPicture(), "Draw the memory timeline of the step to a PNG, PDF or SVG file.")
@json_option
def plan(
    config: Path,
    batch: int,
    tokens: int | None,
    dtype: str,
    optimizer: str,
    state_bits: str,
    method: str,
    teacher: Path | None,
    samples: int | None,
    max_new_tokens: int | None,
    reward: tuple[str, ...],
    lora: int | None,
    quantize: str | None,
    merge_into: str | None,
    recompute_every: int | None,
    offload: bool,
    chunked_mlp: bool | None,
    accumulate: int,
    device: str,
    fitting: bool,
    data: tuple[str, ...],
    host_memory: int | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    data_parallel: int | None,
    context_parallel: int | None,
    expert_parallel: int | None,
    context_attention: str | None,
    pipeline_schedule: str | None,
    chunks: int | None,
    zero: str,
    plot: Path | None,
) -> None:
    """Show how much memory a training step needs.

    The command also shows which GPUs have enough memory. CONFIG is a config.json or the folder of a
    model or an adapter; model weights are not read. With several ranks, --batch is the batch size
    per data rank. The table then has the memory per rank of each pipeline stage, and --plot draws
    the stage with the highest peak.
    """
    from ..models.parse import parse

    if fitting:
        fits = fit(
            config, data=data_of(data), device=device, method=method, host_memory=host_memory,
            **settings_of_command(),
        )  # fmt: skip
        show_fits(machine.console(), fits, str(config))
        return
    _check_fit(data=data or None, host_memory=host_memory)
    device, named_card = device_and_card(device)
    path = config_file(config)
    own = source_of(path.parent) == path.parent
    sizes = (
        tensor_parallel, pipeline_parallel, data_parallel, context_parallel, expert_parallel
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "teacher": teacher, "samples": samples, "max_new_tokens": max_new_tokens, "reward": reward,
        "accumulate": accumulate, "zero": int(zero), "data_parallel": data_parallel,
        "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel,
        "context_parallel": context_parallel, "expert_parallel": expert_parallel,
    }  # fmt: skip
    objective = objective_of(method, arguments)
    folder, values, adapter, stored = facts_of(
        config, {} if objective is None else objective.loading
    )
    quantize = quantized_kind(folder and source_of(folder), quantize, lora, adapter, stored)
    if adapter is not None and lora is not None:
        raise ConfigError(
            f"{folder} is an adapter already, and is planned as it is; leave --lora out"
        )
    options: dict[str, Any] = {
        "dtype": dtype,
        "optimizer": optimizer,
        "state_bits": int(state_bits),
        "rank": lora,
        "adapter": adapter,
        "quantization": quantize,
        "merge_into": merge_into,
        "recompute_every": recompute_every,
        "offload": offload,
        "chunked_mlp": chunked_mlp,
        "accumulate": accumulate,
        "device": device,
    }

    with _named(path):
        positions = parse(values).positions
        length = tokens_of(tokens, positions)
        objective = sized(objective, values, max_new_tokens, length)
    check_optimizer(
        optimizer, int(state_bits), tensor_parallel or 1, int(zero), expert_parallel or 1
    )
    check_options(
        pipeline_parallel or 1, context_parallel or 1, int(zero), pipeline_schedule, chunks,
        context_attention, accumulate, expert_parallel or 1,
    )  # fmt: skip
    method_text = f", {method} on {METHODS[method].unit}" * (objective is not None)
    if any(size is not None for size in sizes):
        _check_alone(merge_into=options.pop("merge_into"))
        if optimizer == "none":
            raise ConfigError(
                "plan: plans of several ranks need an optimizer; leave --optimizer none out"
            )
        tensor, pipeline, replicas, context, expert = (size or 1 for size in sizes)
        layout = Layout(tensor, pipeline, replicas, int(zero), context, expert)
        with _named(path):
            plans = plan_ranks(
                values, layout, batch=batch, tokens=length, microbatches=options.pop("accumulate"),
                schedule=pipeline_schedule or "1f1b", chunks=chunks_of(pipeline_schedule, chunks),
                context_attention=context_attention or "ring", objective=objective or next_token,
                **options,
            )  # fmt: skip
        title = f"{path if own else config}: {_grid(layout, accumulate)} {batch} x {length} tokens"
        title += f" per data rank, {dtype}{options_text(options)}{method_text}"
        title += words_of(pipeline_schedule, chunks, context_attention)
        _show(of_stages(plans, title), plans, title, plot)
        show_rollouts(machine.console(), plans, objective, batch, length)
        return

    @cache
    def planned(rows: int, length: int, **changes: Any) -> MemoryPlan:
        more = {**options, **changes}
        return plan_memory(values, batch=rows, tokens=length, objective=objective, **more)

    with _named(path):
        memory_plan = planned(batch, length)
    extra = options_text(options) + f", the adapter in {folder}" * (adapter is not None)
    title = f"{path if own else config}: {batch} x {length} tokens, {dtype}{extra}{method_text}"
    _show(ledger(memory_plan, title), [memory_plan], title, plot)
    console = machine.console()
    show_rollouts(console, [memory_plan], objective, batch, length)
    here = machine.device_memory(None if device == "cpu" else device)[0]
    console.print(cards(planned, batch, length, positions, here, named_card))
    if (adapter, stored) == (None, None) and optimizer != "none" and not parse(values).bit_layers:
        console.print(
            training_methods(partial(planned, batch, length), lora or RANK, quantize or "nf4", here)
        )


def _check_fit(**options: Any) -> None:
    """Raise a ConfigError for options that --fit alone reads."""
    for name, value in options.items():
        if value is not None:
            own = named(name)
            raise ConfigError(f"plan: {own} requires --fit; add --fit, or leave {own} out")


def device_and_card(name: str) -> tuple[str, dict[str, int]]:
    """Return "cuda" or "cpu", and the bytes of the card that was named, by its name."""
    if name in DEVICES:
        return name, {}
    card = card_named(name)
    return "cuda", {} if card.memory is None else {card.name: round(card.memory * GB)}


def settings_of_command() -> dict[str, Any]:
    """Return the settings on the command line of plan; raise for settings of ranks."""
    context = click.get_current_context()
    settings = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for name in ("config", "fitting", "data", "device", "host_memory", "method"):
        settings.pop(name, None)
    known = {field.name for field in dataclasses.fields(Settings)}
    ranks = {"zero", "chunks", "context_attention", "pipeline_schedule"}
    ranks |= {name for name in settings if name.endswith("_parallel")}
    for name in settings:
        if name in ranks or name not in known:
            raise ConfigError(f"plan --fit: {named(name)} is not supported; leave it out")
    if "state_bits" in settings:
        settings["state_bits"] = int(settings["state_bits"])
    return settings


def _grid(layout: Layout, batches: int) -> str:
    """Return in words the sizes of a grid of ranks, and the number of batches per step."""
    axes = ["tensor", *["expert"] * (layout.expert > 1), "context", "pipeline", "data"]
    sizes = ", ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    return f"ranks: {sizes}; {batches} batch{'es' * (batches > 1)} of"


def _show(table: Any, plans: list[MemoryPlan], title: str, plot: Path | None) -> None:
    """Print the table of plans; draw the plan with the highest peak if ``plot`` is set."""
    console = machine.console()
    console.print(table)
    if plot is not None:
        draw_timeline(plot, max(plans, key=lambda plan: plan.total), title)
        console.print(f"timeline: {plot}", markup=False)


def facts_of(config: Path, head: dict[str, Any]) -> tuple[Path | None, Any, Any, str | None]:
    """Return folder, config.json (with a head), adapter and quantization of a model."""
    from ..files import read_json
    from ..models.configs.heads import chosen

    path = config_file(config)
    folder = None if path == config else model_folder(config)
    values = chosen(read_json(path), head.get("head"), head.get("labels")).values
    known = (None, None) if folder is None else model_without_weights(folder, **head)[1:]
    return folder, values, *known


def objective_of(name: str, options: dict[str, Any]) -> Any:
    """Return a method with the config of its teacher; None for sft."""
    settings, teacher = Settings(method=name, **options), options["teacher"]
    settings.check_method(whole=not METHODS[name].is_on_policy)
    folders = {} if teacher is None else {"teacher": folder_of(teacher)}
    return None if name == "sft" else with_teacher(settings.learning, folders)


def words_of(schedule: str | None, chunks: int | None, context_attention: str | None) -> str:
    """Return the options of ranks for the title of a plan."""
    each = (schedule, chunks and f"{chunks} chunks", context_attention)
    return "".join(f", {word}" for word in each if word)


def sized(objective: Any, values: Any, new: int | None, length: int) -> Any:
    """Return a method with the length of its sampled answers."""
    if objective is None or not objective.is_on_policy:
        return objective
    if new is not None and new >= length:
        problem = f"--max-new-tokens {new} leaves no prompt in --tokens {length}"
        raise ConfigError(f"{problem}; give fewer, or more --tokens")
    return objective.sized(values)


def _check_alone(**options: Any) -> None:
    """Raise a ConfigError for a plan with ranks and an option that supports one rank."""
    for name, value in options.items():
        if value is not None:
            cure = "each rank of --data-parallel needs as much as a single rank with its rows"
            problem = f"plan --{name.replace('_', '-')} supports one rank"
            raise ConfigError(f"{problem}; leave the ranks out: {cure}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Prefix a ConfigError with the path of its file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
