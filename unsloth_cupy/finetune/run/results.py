"""Prints the results of a run, a sample of its model, and the next commands."""

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, printable
from ...files import read_json
from ...machine import SCREEN, console, cut, echo, echo_next, format_bytes
from ...models.adapters.adapter_base import ADAPTER
from ...models.folders.pooling import pooling_of
from ...models.generation.streaming import NEW, TEMPERATURE, stream_text
from ...models.quantizer import IN_FOLDERS
from ..data.chat import Chat
from ..methods.registry import MEASURES, METHODS
from .loop import Loop
from .run_folder import RunFolder, model_without_weights

CALLS = (  # next calls after a run; the second is for language models, the last for adapters
    'finetune.evaluate("{folder}", "held_out.jsonl")',
    'models.export_gguf("{folder}", "{folder}.gguf", kind="q4_k_m")',
    'models.merge("{folder}", "{folder}-merged")',
)
SAMPLE_TOKENS = NEW  # as in unsloth-cupy generate
RULE = 80  # columns of a separator line
MOST = 700.0  # nats; exp of more overflows a float


def report(run: RunFolder) -> None:
    """Print the table of a run's results."""
    from rich.table import Table

    lines, best = run.lines(), run.best()
    if best is None:
        raise ConfigError(f"{run.log} holds no evaluation; it is not the log of a finished run")
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "held_out_loss" in line]
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    place = f"{best['step']} of {max((line['step'] for line in steps), default=0)}"
    table.add_row("best step", f"{place} (evaluation loss {best['held_out_loss']:.3f})")
    if run.stopped is not None:
        table.add_row("end", run.stopped)
    after = (
        best if read_json(run.settings).get("keeps_best") else evaluations[-1]
    )  # measures of the saved model
    for row in losses(evaluations[0], after, of_new_model=run.of_new_model):
        table.add_row(*row)
    seconds = sum(line["seconds"] for line in steps)
    table.add_row("time", f"{seconds:.0f} s for {len(steps)} step{'s' * (len(steps) > 1)}")
    if speed := speed_of(steps):
        table.add_row("speed", speed)
    counted = [line for line in steps if "peak_bytes" in line]
    if counted:
        planned = max(line.get("planned_bytes", 0) for line in counted)
        peak = max(line["peak_bytes"] for line in counted)
        off = difference(planned, peak)
        text = f"planned {format_bytes(planned)}, measured {format_bytes(peak)} ({off})"
        table.add_row("peak array memory", text)
    table.add_row("peak process memory", format_bytes(max(line["memory_bytes"] for line in steps)))
    table.add_row("model", str(run.model))
    table.add_row("loss curve", str(run.curve))
    table.add_row("log", str(run.log))
    console(markup=False).print(table)


def speed_of(steps: Sequence[dict[str, Any]]) -> str:
    """Return the speed of the steps that are timed, in tokens per second; empty without them."""
    timed = [*filter(is_timed, steps)]
    if not timed:
        return ""
    tokens = sum(line["tokens_per_second"] * line["seconds"] for line in timed)
    speed = tokens / sum(line["seconds"] for line in timed)
    text = f"{speed:,.0f} tokens/s, not counting padding"
    if (others := len(steps) - len(timed)) > 0:
        counted = f"{others} slower step{'s' * (others > 1)}"
        text += f" and {counted} that measured memory"
    return text


def difference(planned: int, measured: int) -> str:
    """Return in words the error of a plan, in percent of the measured memory; both are in bytes."""
    off = round(100 * (planned - measured) / max(measured, 1), 2)
    return f"plan {abs(off):.2f} % too {'high' if off > 0 else 'low'}" if off else "equal"


def losses(
    before: Mapping[str, Any], after: Mapping[str, Any], *, of_new_model: bool
) -> Iterator[tuple[str, str]]:
    """Yield rows (name, value): before and after training; for a new model, with the baseline."""
    loss, baseline = after["held_out_loss"], after.get("unigram_baseline")
    unit = " nats per token" * (baseline is not None)
    if baseline is not None and of_new_model:
        yield "unigram baseline", f"{baseline:.3f}{unit}"
        side = "below" if loss < baseline else "above"
        yield (
            "evaluation loss",
            f"{loss:.3f}{unit} ({abs(baseline - loss):.3f} {side} the baseline)",
        )
        shown = f"{_perplexity(loss):.1f} (baseline {_perplexity(baseline):.1f})"
        yield "perplexity", shown
        return
    first = before["held_out_loss"]
    form = ".3f" if unit else ".4g"  # nats per token have similar magnitudes, other losses do not
    yield "evaluation loss", f"{first:{form}} -> {loss:{form}}{unit}"
    if unit:
        yield "perplexity", f"{_perplexity(first):.1f} -> {_perplexity(loss):.1f}"
    for name in MEASURES:
        values = [line.get(f"held_out_{name}") for line in (before, after)]
        shown = " -> ".join(f"{value:.4g}" for value in values if value is not None)
        if shown:
            yield f"evaluation {name.replace('_', ' ')}", shown


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, MOST))


def summary(run: RunFolder, name: str) -> str:
    """Return a summary of a run in at most 24 lines: folder, losses, next calls.

    The summary is read from the files of the run, which may be unfinished or broken.
    """
    try:
        rows = [*_facts(run), *_calls(run)]
    except (ConfigError, OSError) as error:
        problem = textwrap.wrap(str(error), SCREEN[1] - 20) or [type(error).__name__]
        names = ["problem", *[""] * (len(problem) - 1)]
        rows = [("folder", str(run.folder)), *zip(names, problem, strict=True)]
    width = max(len(each) for each, _ in rows) + 2
    lines = [f"Run {name}", *(f"  {each:<{width}}{value}" for each, value in rows)]
    return "\n".join(cut(printable(line), SCREEN[1]) for line in lines[: SCREEN[0]])


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    """Return rows (name, value): folder, steps, and measures of the first and last lines."""
    lines = run.lines()
    steps = [line for line in lines if "loss" in line]
    held_out, best = [line for line in lines if "held_out_loss" in line], run.best()
    state = "finished" if run.finished else "not finished"
    step = f"{lines[-1]['step']:,}" if lines else "none"
    rows = [("folder", str(run.folder)), ("steps", f"{step}, {state}")]
    if best is not None:
        rows.append(
            ("best step", f"{best['step']:,} (evaluation loss {best['held_out_loss']:.4g})")
        )
    if run.stopped is not None:
        rows.append(("end", run.stopped))
    for kind, each in (("", steps), ("held_out_", held_out)):
        for measure in ("loss", *(MEASURES if kind else ())):
            known = [line[kind + measure] for line in each if line.get(kind + measure) is not None]
            if known and len(rows) < SCREEN[0] - len(CALLS) - 2:
                label = f"{'evaluation' if kind else 'training'} {measure}".replace("_", " ")
                rows.append((label, f"{known[0]:.4g} -> {known[-1]:.4g}"))
    return rows


def _calls(run: RunFolder) -> list[tuple[str, str]]:
    """Return rows with the Python calls that use a run."""
    if not run.finished:
        return [("next", "Trainer(...).train() with the same arguments resumes it")]
    values = read_json(run.settings)
    method = METHODS[values.get("method", "sft")]
    use = 'model.generate_text("Once upon a time")'
    if Chat(run.model).stored:
        use = 'model.generate_text([{"role": "user", "content": "Hello"}])'
    if method.example:
        use = method.example.format(
            pooling=values.get("pooling") or pooling_of(run.model) or "mean"
        )
    evaluation, export, merge = CALLS
    into, calls = values.get("merge_into"), [evaluation]
    if not method.example and into not in IN_FOLDERS and export_commands(run.model, run.folder):
        calls.append(export if into is None else export.replace(', kind="q4_k_m"', ""))
    if (run.model / ADAPTER).exists() and (into is None or into in IN_FOLDERS):
        calls.append(merge)
    each = [call.format(folder=json.dumps(str(run.folder))[1:-1]) for call in calls]
    return [("model", str(run.model)), ("next", f"run.{use}"), *(("", call) for call in each)]


def print_next_commands(run: RunFolder, *, err: bool = True) -> None:
    """Print the next commands after a run, to standard error (``err``) or standard output."""
    values = read_json(run.settings)
    method = METHODS[values.get("method", "sft")]
    measure = []
    if isinstance(held_out := values.get("eval"), str) and not method.compares:
        measure = [["evaluate", run.folder, "--data", held_out]]
    if method.example:  # the model does not generate text
        load = f"models.load({json.dumps(str(run.model))})"
        used = method.example.format(
            pooling=values.get("pooling") or pooling_of(run.model) or "mean"
        )
        code = f"from unsloth_cupy import models; model = {load}; print({used})"
        echo_next(["python", "-c", code], *(["unsloth-cupy", *words] for words in measure), err=err)
        return
    generate = generate_command(run.folder, run.model)
    merges = [["merge", run.folder, f"{run.folder}-merged"]]
    merges = merges if (run.model / ADAPTER).exists() else []
    files = export_commands(run.model, run.folder)
    if (kind := values.get("merge_into")) is not None:
        merges, files = (merges, []) if kind in IN_FOLDERS else ([], files)
        files = [[*words[:3], *words[5:]] for words in files]  # without --type: that of the run
    commands = [generate, *measure, *merges, *files]
    echo_next(*(["unsloth-cupy", *words] for words in commands), err=err)


def generate_command(folder: Path, words: Path) -> list[object]:
    """Return the command that generates text with the model in a folder, or starts a chat."""
    question = ["--chat"] if Chat(words).stored else ["Once upon a time"]
    return ["generate", folder, *question]


def export_commands(model: Path, folder: Path) -> list[list[object]]:
    """Return the export command for a model, if llama.cpp supports the model."""
    from ...models.gguf.export import why_no_file

    try:
        supported = not why_no_file(model_without_weights(model).config)
    except ConfigError:  # the base model is in the folder that --base named
        supported = True
    command = ["export", folder, f"{folder}.gguf", "--type", "q4_k_m", "--modelfile"]
    return [command] if supported else []


def results_of(run: RunFolder) -> dict[str, Any]:
    """Return the results of a run for JSON: its last and best lines, and its files."""
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
    """Return whether a step has a speed; steps that measure memory have none."""
    return line["tokens_per_second"] is not None


def sample(loop: Loop) -> None:
    """Print a sample: an answer to the first evaluation prompt, or a continued evaluation text."""
    prompt, parts = loop.training_data.prompt, loop.training_data.examples
    is_answer = bool(parts) and len(prompt) < len(parts[1][0].tokens)
    tokens = prompt[: loop.model.config.positions - 1]  # room for one more
    title = "answer to the first evaluation prompt" if is_answer else "continued evaluation text"
    _rule(f"sample: {title}")
    echo(loop.tokenizer.decode(tokens, skip_special_tokens=not is_answer), nl=is_answer)
    if is_answer:
        _rule("answer")
    stream_text(
        loop.model, loop.model.tokenizer, tokens,
        max_new_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, seed=loop.plan.seed,
    )  # fmt: skip
    _rule()


def _rule(title: str = "") -> None:
    """Print a separator line."""
    echo(f"--- {title} ".ljust(RULE, "-") if title else "-" * RULE)
