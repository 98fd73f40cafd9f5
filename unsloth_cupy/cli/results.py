"""Prints the result of a run, and a sample of its model."""

import json
import math
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import read_json
from ..finetune.data.chat import Chat
from ..finetune.methods.registry import MEASURES, METHODS
from ..finetune.run.loop import Loop
from ..finetune.run.run_folder import RunFolder, model_without_weights
from ..machine import console, format_bytes
from ..models.adapters.adapter_base import ADAPTER
from ..models.quantizer import IN_FOLDERS
from .echo import echo, echo_next
from .streaming import stream_text

SAMPLE_TOKENS = 120
MOST = 700.0  # nats whose perplexity is a float


def report(run: RunFolder) -> None:
    """Print the table of a run's results."""
    from rich.table import Table

    lines = run.lines()
    last = next((line for line in reversed(lines) if "held_out_loss" in line), None)
    if last is None:
        raise ConfigError(f"{run.log} holds no evaluation; it is not the log of a finished run")
    loss, baseline = last["held_out_loss"], last.get("unigram_baseline")
    steps = [line for line in lines if "loss" in line]
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if baseline is None:
        first = next(line for line in lines if "held_out_loss" in line)
        for name in ("loss", *MEASURES):
            value, before = (line.get(f"held_out_{name}") for line in (last, first))
            if value is not None:
                shown = f"{value:.4g}" + f", {before:.4g} at first" * (before is not None)
                table.add_row(f"held-out {name.replace('_', ' ')}", shown)
    else:
        table.add_row("unigram baseline", f"{baseline:.3f} nats per token")
        side = "below" if loss < baseline else "above"
        off = f"{abs(baseline - loss):.3f} {side}"
        table.add_row("held-out loss", f"{loss:.3f} nats per token, {off}")
        table.add_row(
            "perplexity",
            f"{math.exp(min(loss, MOST)):.1f} (baseline {math.exp(min(baseline, MOST)):.1f})",
        )
    seconds, timed = sum(line["seconds"] for line in steps), [*filter(is_timed, steps)]
    text = f"{seconds:.0f} s in {len(steps)} step{'s' * (len(steps) > 1)}"
    if timed:
        tokens = sum(line["tokens_per_second"] * line["seconds"] for line in timed)
        text += f", {tokens / sum(line['seconds'] for line in timed):.0f} tokens/s"
    table.add_row("time", text)
    counted = [line for line in steps if "peak_bytes" in line]
    if counted:
        planned = max(line.get("planned_bytes", 0) for line in counted)
        peak = max(line["peak_bytes"] for line in counted)
        off = f"{100 * (planned - peak) / max(peak, 1):+.1f} %"
        text = f"planned {format_bytes(planned)}, measured {format_bytes(peak)} ({off})"
        table.add_row("arrays of a step", text)
    table.add_row("peak of the process", format_bytes(max(line["memory_bytes"] for line in steps)))
    table.add_row("model", str(run.model))
    table.add_row("loss curve", str(run.curve))
    table.add_row("numbers", str(run.log))
    console(markup=False).print(table)


def what_follows(run: RunFolder) -> None:
    """Print the commands that use a finished run."""
    values = read_json(run.settings)
    method = METHODS[values.get("method", "sft")]
    if method.example:  # it writes no text
        load = f"models.load({json.dumps(str(run.model))})"
        used = method.example.format(pooling=values.get("pooling") or "mean")
        code = f"from unsloth_cupy import models; model = {load}; print({used})"
        echo_next(["python", "-c", code])
        return
    asks = ["generate", run.folder]
    asks += ["--chat"] if Chat(run.model).stored else ["Once upon a time"]
    merges = [["merge", run.folder, f"{run.folder}-merged"]]
    merges = merges if (run.model / ADAPTER).exists() else []
    files = exports(run.model, run.folder)
    if (kind := values.get("merge_into")) is not None:
        merges, files = (merges, []) if kind in IN_FOLDERS else ([], files)
        files = [[*words[:3], *words[5:]] for words in files]  # in the type of the run
    follow = [asks, *merges, *files]
    echo_next(*(["unsloth-cupy", *words] for words in follow))


def exports(model: Path, folder: Path) -> list[list[object]]:
    """Return the command that writes the model in a folder to a file, where llama.cpp has it."""
    from ..models.gguf.export import has_architecture

    try:
        known = has_architecture(model_without_weights(model).config)
    except ConfigError:  # its base is in a folder that was named for the run
        known = True
    command = ["export", folder, f"{folder}.gguf", "--type", "q4_k_m", "--modelfile"]
    return [command] if known else []


def results_of(run: RunFolder) -> dict[str, Any]:
    """Return the results of a run as JSON has them: its last and best lines, and its files."""
    lines = run.lines()
    step: dict[str, Any] = next((line for line in reversed(lines) if "loss" in line), {})
    last: dict[str, Any] = next((n for n in reversed(lines) if "held_out_loss" in n), {})
    files = {"model": run.model, "log": run.log}
    return {
        **step,
        **last,
        "seconds": sum(line.get("seconds", 0.0) for line in lines),
        "best": run.best(),
        **{name: str(path) for name, path in files.items()},
    }


def is_timed(line: dict[str, Any]) -> bool:
    """Return whether a step has a speed: the first ones, slowed by counting arrays, have none."""
    return line["tokens_per_second"] is not None


def sample(loop: Loop) -> None:
    """Print the model's continuation of the beginning of the held-out text."""
    tokens = loop.training_data.prompt[: loop.model.config.positions - 1]  # room for one more
    echo("\nsampled text:\n")
    echo(loop.tokenizer.decode(tokens), nl=False)
    stream_text(
        loop.model, loop.model.tokenizer, tokens,
        max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_p=0.95, seed=loop.plan.seed,
    )  # fmt: skip
