"""Tables of ``unsloth-cupy plan``: the memory of a step, and cards that have enough memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import machine
from ..finetune.planning.choices import Fits
from ..finetune.run.printer import duration
from ..machine import format_bytes
from ..memory.largest import Largest
from ..memory.ledger import ALL, ROLLOUTS, MemoryPlan
from ..profiling.explanation import time

CARDS = (8, 16, 24, 48, 80, 141)  # GB, common memory sizes of GPUs
GB = 2**30
BEYOND = 4  # each plan of a longer row takes longer, as its rotary tables are computed
LARGEST = 4  # number of ops whose workspaces are shown
HOLDS = {
    "weights": "weights of the forward pass, including adapters",
    "gradients": "gradients of weights or adapters, including accumulated ones",
    "optimizer": "optimizer states of trained weights",
    "master": "float32 master copies of 16-bit weights",
    "activations": "arrays that forward stores for backward",
    "logits": "logits that exist at the same time, and the gradient of the head",
    "workspace": "temporary arrays of ops, and gradients of activations",
}


def options_text(options: Mapping[str, Any]) -> str:
    """Return the options of a plan that differ from their defaults, as text for its title."""
    known: dict[str, tuple[str, Any]] = {
        "lora": ("rank", None),
        "quantized to": ("quantization", None),
        "merged into": ("merge_into", None),
        "recompute every": ("recompute_every", None),
        "accumulate": ("accumulate", 1),
        "optimizer": ("optimizer", "adamw"),
        "state bits": ("state_bits", 32),
    }
    values = ((name, options.get(key, default), default) for name, (key, default) in known.items())
    text = "".join(f", {name} {value}" for name, value, default in values if value != default)
    return (
        text
        + ", offload" * options.get("offload", False)
        + ", chunked MLP" * bool(options["chunked_mlp"])
    )


def ledger(plan: MemoryPlan, title: str) -> Any:
    """Return the table of a plan: the maximum of each category, and its size at the peak.

    Activations have rows for layers, workspace has rows for the ops with the largest workspaces.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    table.add_column("memory", style="bold")
    table.add_column("maximum", justify="right")
    table.add_column("at the peak", justify="right")
    table.add_column("contents", style="dim")
    for name, meaning in HOLDS.items():
        most, at_peak = getattr(plan, name), plan.at_peak[name]
        table.add_row(name, format_bytes(most), format_bytes(at_peak), meaning)
        inner = runs(plan.layers) if name == "activations" else []
        if name == "workspace":
            inner = sorted(plan.workspaces.items(), key=lambda each: -each[1])[:LARGEST]
        for part, size in inner:
            table.add_row(f"  {part}", format_bytes(size), "", style="dim")
    table.add_section()
    moment = plan.moments[plan.peak]
    where = f"peak in op {plan.peak + 1} of {len(plan.moments)}: {moment}"
    table.add_row("total", "", format_bytes(plan.total), where)
    if plan.host:
        table.add_row(
            "host", format_bytes(plan.host), "", "offloaded inputs of blocks, in pinned memory"
        )
    return table


def of_stages(plans: Sequence[MemoryPlan], title: str) -> Any:
    """Return the table of peak memory per rank, with a column per pipeline stage."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    table.add_column("at the peak", style="bold")
    for stage in range(len(plans)):
        table.add_column(f"stage {stage}", justify="right")
    for name in ALL:
        table.add_row(name, *(format_bytes(plan.at_peak[name]) for plan in plans))
    table.add_section()
    table.add_row("total per rank", *(format_bytes(plan.total) for plan in plans))
    if any(plan.host for plan in plans):
        table.add_row("host memory per rank", *(format_bytes(plan.host) for plan in plans))
    return table


def show_rollouts(
    console: Any, plans: Sequence[MemoryPlan], method: Any, batch: int, tokens: int
) -> None:
    """Print a line per stage about the memory of rollouts, for methods that sample answers."""
    for plan in plans:
        for moment in (each for each in plan.moments if each.op == ROLLOUTS):
            longest = tokens - method.question_length(tokens)
            few = f"{batch * method.samples:,} answers of {longest:,} tokens for {batch:,} prompts"
            held = f"{format_bytes(moment.total)} at the peak"
            where = f"stage {plans.index(plan)}: " * (len(plans) > 1)
            console.print(f"{where}sampling {few} needs {held}", markup=False)


def training_methods(
    planned: Callable[..., MemoryPlan], rank: int, kind: str, here: int | None
) -> Any:
    """Return the table of a step's memory for training all weights, LoRA and QLoRA."""
    from rich.table import Table

    table = Table(title="this step with other trainable parameters", title_justify="left")
    table.add_column("trainable parameters")
    table.add_column("memory", justify="right")
    table.add_column("smallest card", justify="right")
    sizes = [(f"{size} GB", size * GB) for size in CARDS]
    sizes += [] if here is None else [(f"here: {here / GB:.1f} GB", here)]
    for method, changes in (
        ("all weights", {"rank": None, "quantization": None}),
        (f"--lora {rank}", {"rank": rank, "quantization": None}),
        (f"--quantize {kind} --lora {rank}", {"rank": rank, "quantization": kind}),
    ):
        total = planned(**changes, merge_into=None).total
        fits = [(size, name) for name, size in sizes if total <= size]
        table.add_row(method, format_bytes(total), min(fits)[1] if fits else "-")
    return table


def show_fits(console: Any, fits: Fits, name: str) -> None:
    """Print the choices of ``fit``, and for each why its settings are needed and its command."""
    from rich.markup import escape
    from rich.table import Table

    steps = "" if fits.steps is None else f", {fits.steps:,} steps"
    memory = f"{format_bytes(fits.device_memory)} of GPU memory for arrays"
    host = f"{format_bytes(fits.host_memory)} of host memory for --offload"
    title = f"{name} on {fits.card.name}: rows of {fits.tokens:,} tokens{steps}"
    title += f"; available: {memory}, {host}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("settings", style="bold")
    for heading in (
        "GPU memory", "host memory", "time per step", "total time", "tokens/s", "longest row",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    choices: dict[str, list[str]] = {}
    rows = {"fastest": fits.fastest, "longest row": fits.longest, "least memory": fits.leanest}
    for label, each in rows.items():
        choices.setdefault(each.command, []).append(label)
        table.add_row(
            label, format_bytes(each.device_bytes), format_bytes(each.host_bytes),
            time(each.seconds), "-" if each.hours is None else duration(3600 * each.hours),
            f"{each.tokens_per_second:,.0f}", f"{each.longest_row:,}",
        )  # fmt: skip
    console.print(table)
    commands = Table("choice", "command", title="to train with these settings")
    reasons = {each.command: each.reasons for each in rows.values()}
    for command, labels in choices.items():
        commands.add_row(", ".join(labels), escape(command))
    if machine.tables_as_json.get():
        console.print(commands)
        return
    for command, labels in choices.items():
        lines = [f"{', '.join(labels)}:", *(f"  {reason}" for reason in reasons[command])]
        console.print("\n".join([*lines, f"  {command}"]), markup=False, soft_wrap=True)
    if fits.not_varied:
        console.print(f"Not varied: {', '.join(fits.not_varied)}.", markup=False)
    console.print(
        "Longest rows are in tokens. Times are predicted and exclude evaluations; the rates of the"
        f" card are {fits.card.source}. For comparison: for a step of a model of 495M parameters"
        " on an H200, 39.5 ms are predicted and 43.9 ms were measured.",
        markup=False,
    )


def runs(layers: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return rows with layers and bytes; consecutive layers of the same size share a row."""
    groups: list[tuple[list[str], int]] = []
    for layer, size in layers.items():
        if groups and groups[-1][1] == size and groups[-1][0][-1].startswith("layer "):
            groups[-1][0].append(layer)
        else:
            groups.append(([layer], size))
    return [
        (names[0], size)
        if len(names) == 1
        else (f"layers {names[0].split()[1]} .. {names[-1].split()[1]}, each", size)
        for names, size in groups
    ]


def cards(
    planned: Callable[[int, int], MemoryPlan],
    batch: int,
    tokens: int,
    positions: int,
    here: int | None,
    named: Mapping[str, int],
) -> Any:
    """Return the table of the largest batches and longest rows that fit each card.

    ``positions`` limits the length of rows; if the rows of this step have more, BEYOND times them.
    ``named`` are the bytes of a card by its name.
    """
    from rich.table import Table

    table = Table(title="what fits", title_justify="left")
    table.add_column("card", justify="right")
    table.add_column("this step", justify="right")
    table.add_column(f"largest batch of rows of {tokens} tokens", justify="right")
    table.add_column(f"longest row in tokens, in a batch of {batch}", justify="right")
    total = planned(batch, tokens).total
    by_batch = Largest(lambda rows: planned(rows, tokens).total)
    step, most = min(64, positions), positions if tokens <= positions else BEYOND * tokens
    by_tokens = Largest(lambda length: planned(batch, length).total, step, most)
    sizes = [*named.items()]
    sizes += [] if here is None else [(f"here: {here / GB:.1f} GB", here)]
    for name, limit in [*sizes, *((f"{size} GB", size * GB) for size in CARDS)]:
        fits = (
            f"[green]fits, uses {total / limit:.1%}[/]" if total <= limit else "[red]too large[/]"
        )
        rows, length = by_batch(limit), by_tokens(limit)
        table.add_row(name, fits, str(rows or "-"), str(length or "-"))
    return table
