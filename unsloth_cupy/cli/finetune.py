"""``unsloth-cupy finetune``: trains a model on a text."""

import math
import shlex
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from ..errors import ConfigError
from ..finetune.curve import draw_curve
from ..finetune.interrupt import Interrupted, Stop, stop_request
from ..finetune.loop import Loop
from ..finetune.new_model import SIZES
from ..finetune.preparation import Request, prepare
from ..finetune.ranks import start
from ..finetune.records import SUFFIX, Records, read_records
from ..finetune.results import report, sample
from ..finetune.run_folder import RunFolder, fingerprints, model_folder
from ..finetune.settings import Settings, read_settings, settings_of
from ..finetune.text import Text, read_text
from ..machine import blas_threads
from ..models.adapter_base import base_of
from .options import (
    ATTENTION,
    FILE,
    QUANTIZE,
    SCHEDULE,
    ZERO,
    ConfigFile,
    Device,
    Number,
    Size,
    option,
)
from .profiled import profiled

STEPS = 1200
DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("model", metavar="[MODEL_FOLDER]", required=False, type=FILE)
@option("--text", FILE, "UTF-8 file to train on, or .jsonl lines.  [default: Python's docs]")
@click.option("--pack/--no-pack", default=None, help="Lines share rows.  [default: --pack]")
@option("--out", FILE, "Folder of the run.  [default: runs/MODEL-TEXT]")
@option("--config", ConfigFile(), "TrainingConfig as JSON or TOML; options override it.")
@option("--steps", click.IntRange(1), f"Updates of the weights.  [default: {STEPS}]")
@option("--epochs", Number(0, min_open=True), "Passes through the text, in place of --steps.")
@option("--lr", Number(0, min_open=True), "Highest learning rate.  [default: by model]")
@option("--batch", click.IntRange(1), "Rows of text in a step.", 4)
@option("--tokens", click.IntRange(2), "Tokens in a row.", 128)
@option("--weight-decay", Number(0), "Share of the weights removed per step, times lr.", 0.1)
@option("--max-norm", Number(0, min_open=True), "Norm to clip gradients to.", 1.0)
@option(
    "--dtype",
    click.Choice(DTYPES),
    "Of the computation; trained weights stay float32.",
    "float32",
)
@option("--save-dtype", click.Choice(DTYPES), "Of the weights saved at the end.", "float32")
@option("--lora", click.IntRange(1), "Train adapters of this rank; the model is frozen.")
@option("--quantize", QUANTIZE, "Store the model in fewer bits, as nf4; with --lora.")
@click.option("--train-weights", is_flag=True, help="With --quantize ternary: train a new model.")
@option("--accumulate", click.IntRange(1), "Batches whose gradients are summed per step.", 1)
@option("--checkpoint-every", click.IntRange(1), "Keep the input of one block in N: less memory.")
@click.option("--chunked-mlp", is_flag=True, help="Compute MLPs in chunks, twice: less memory.")
@option("--state-bits", click.Choice(["32", "8"]), "Bits of the optimizer's averages.", "32")
@option("--seed", click.IntRange(0), "Of new weights, the order of the text and the sample.", 0)
@option(
    "--evaluate-every",
    click.IntRange(1),
    "Steps between held-out losses.  [default: a tenth of all steps]",
)
@option("--save-every", click.IntRange(1), "Steps between checkpoints.", 100)
@option("--device", Device(), "cpu, cuda or cuda:1.", "cpu")
@option("--tensor-parallel", click.IntRange(1), "Ranks that divide each weight.")
@option("--pipeline-parallel", click.IntRange(1), "Ranks that divide the blocks.")
@option("--schedule", SCHEDULE, "Pipeline schedule.  [default: 1f1b]")
@option("--chunks", click.IntRange(1), "Parts of each stage, if interleaved.  [default: 2]")
@option("--data-parallel", click.IntRange(1), "Ranks that divide the rows of a batch.")
@option("--context-parallel", click.IntRange(1), "Ranks that divide the tokens of each row.")
@option("--context-attention", ATTENTION, "ulysses: ranks divide heads.  [default: ring]")
@option("--zero", ZERO, "1: data ranks divide the optimizer's averages; 3: the weights too.", "0")
@option("--limit-memory", Size(), "Limit of array memory, as 2GiB; checked before training.")
@click.option("--find-nan", is_flag=True, help="Name the first layer with a NaN; slower.")
@option("--profile", click.IntRange(1), "Number of steps to time op by op; they are slower.")
@option("--layers", click.IntRange(1), f"Of a new model.  [default: {SIZES['layers']}]")
@option("--hidden", click.IntRange(1), f"Of a new model.  [default: {SIZES['hidden']}]")
@option("--vocabulary", click.IntRange(1), f"Of a new tokenizer.  [default: {SIZES['vocabulary']}]")
def finetune(
    model: Path | None,
    text: Path | None,
    pack: bool | None,
    out: Path | None,
    config: Any,
    steps: int | None,
    epochs: float | None,
    lr: float | None,
    batch: int,
    tokens: int,
    weight_decay: float,
    max_norm: float,
    dtype: str,
    save_dtype: str,
    lora: int | None,
    quantize: str | None,
    train_weights: bool,
    accumulate: int,
    checkpoint_every: int | None,
    chunked_mlp: bool,
    state_bits: str,
    seed: int,
    evaluate_every: int | None,
    save_every: int,
    device: str | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    schedule: str | None,
    chunks: int | None,
    data_parallel: int | None,
    context_parallel: int | None,
    context_attention: str | None,
    zero: str,
    limit_memory: int | None,
    find_nan: bool,
    profile: int | None,
    layers: int | None,
    hidden: int | None,
    vocabulary: int | None,
) -> None:
    """Train the model in MODEL_FOLDER, or a new small Llama, on a text.

    A .jsonl file holds a text, an instruction or a chat in each line; the model is not trained on
    the questions in it. The run is saved in the folder --out: the same command resumes a run that
    was stopped. If mpiexec, torchrun or srun starts the command, ranks share the work; a
    different grid of ranks may resume a run.
    """
    from ..models.folder import on_device

    ranks = start(
        tensor=tensor_parallel, pipeline=pipeline_parallel, data=data_parallel,
        context=context_parallel, device=device,
        zero=int(zero), schedule=schedule, chunks=chunks, context_attention=context_attention,
    )  # fmt: skip
    run: RunFolder | None = None
    with stop_request() as stop, ranks.ending():
        by_lines = text is not None and text.suffix.lower() == SUFFIX
        if pack is not None and not by_lines:
            problem = f"--pack and --no-pack are for the lines of a {SUFFIX} file"
            raise ConfigError(f"{problem}; leave them out")
        if steps is not None and epochs is not None:
            raise ConfigError("--steps and --epochs both say when to end; leave one out")
        pack = by_lines and pack is not False
        request = Request(
            model, text, batch, tokens, layers, hidden, vocabulary, pack, find_nan, ranks.device,
            limit_memory, epochs, evaluate_every, train_weights,
        )  # fmt: skip
        source = None if model is None else model_folder(model)
        if source is not None and (layers or hidden or vocabulary):
            raise ConfigError(
                "--layers, --hidden and --vocabulary describe a new model; leave them out or leave"
                " MODEL_FOLDER out"
            )
        if lora is not None and source is None:
            raise ConfigError("--lora is for an existing model; name its MODEL_FOLDER")
        if train_weights and (quantize != "ternary" or source is not None):
            problem = "--train-weights is for a new model with --quantize ternary"
            raise ConfigError(f"{problem}; leave it out")
        if quantize is not None and source is None and not train_weights:
            raise ConfigError("--quantize is for an existing model; name its MODEL_FOLDER")
        kind = None if train_weights else quantize  # of frozen weights
        rate = lr or (4e-3 if source is None else 1e-4 if lora is None else 1e-3)
        ends = steps or STEPS
        plan = Settings(
            ends, rate, weight_decay, max_norm, seed, evaluate_every or math.ceil(ends / 10),
            save_every, dtype, lora, accumulate, checkpoint_every, int(state_bits), chunked_mlp,
            quantize=kind, **({} if config is None else config.rest),
        )  # fmt: skip
        ranks.check(
            batch, accumulate, limited=bool(limit_memory), offload=plan.offload, find_nan=find_nan,
            packed=pack,
        )  # fmt: skip
        stop.together = not ranks.alone
        stop.interruptible = ranks.alone
        try:
            words = read_records(text) if text is not None and by_lines else read_text(text)
            new = "small-bitnet" if train_weights else "small-llama"
            name = f"{new if model is None else model.resolve().name}-{words.name}"
            run = RunFolder(out or Path("runs") / name)
            with on_device("finetune", ranks.device), ExitStack() as stack:
                if ranks.first:
                    requested = requested_settings(run, request, plan, words, source)
                    stack.enter_context(run.claimed(requested))
                ranks.comm.barrier()  # all ranks see the folder as rank 0 leaves it
                if ranks.broadcast(run.finished):
                    click.echo(f"{run.folder} is finished; more --steps or --epochs continue it,")
                    click.echo("and another --out starts a new run\n")
                    report(run)
                    return
                trainer = prepare(run, request, plan, words, source, ranks)
                with blas_threads(trainer.model.config.hidden), profiled(trainer, profile):
                    train(trainer, name, stop, save_dtype)
        except Interrupted:
            exit_stopped(run, stop)


def requested_settings(
    run: RunFolder, request: Request, plan: Settings, text: Text | Records, source: Path | None
) -> dict[str, Any]:
    """Return the settings of a run, with digests of the base model's files if it has adapters."""
    base: dict[str, Any] = {}
    base_folder = source if plan.lora is not None else source and base_of(source)
    if base_folder is not None:
        known = read_settings(run.settings) if run.settings.is_file() else {}
        base = fingerprints(base_folder, known.get("base") or {})
    more: dict[str, Any] = {"batch": request.batch, "tokens": request.tokens}
    if isinstance(text, Records):
        more["pack"] = request.pack
    if source is None:
        more |= {key: getattr(request, key) or SIZES[key] for key in SIZES}
        more |= {"quantize": "ternary"} if request.train_weights else {}
    if request.epochs is not None:
        more |= {"steps": None, "epochs": request.epochs, "evaluate_every": request.evaluate_every}
    return settings_of(plan, text, source, base, **more)


def train(trainer: Loop, name: str, stop: Stop, save_dtype: str) -> None:
    """Train to the end and draw the loss curve, even after an error; save the model and sample."""
    run = trainer.run
    if trainer.ranks.first:
        for needed in ("matplotlib.figure", "rich.table"):  # fail now, not after the training
            import_module(needed)
    try:
        trainer.train(stop)
    finally:
        if trainer.ranks.first and run.lines():
            draw_curve(run.curve, run.lines(), name)
    stop.uninterruptible("the saving of the model")
    trainer.save_result(run.model, save_dtype)
    newest = trainer.save().name
    if trainer.ranks.first:
        run.drop_checkpoints(before=newest)
    report(run)
    with stop.interruptible_block("the sample"):
        sample(trainer, trainer.plan.seed)


def exit_stopped(run: RunFolder | None, stop: Stop) -> NoReturn:
    """Print which step of a stopped run is saved and how to resume it, then exit."""
    newest = None if run is None else run.newest_checkpoint()
    if run is None or newest is None:
        click.echo("stopped before the first evaluation: nothing is kept", err=True)
    elif not run.finished:
        command = shlex.join(["unsloth-cupy", *sys.argv[1:]])
        step = int(newest.name.rpartition("-")[2])
        click.echo(
            f"stopped after step {step}, saved in {run.folder}; go on with the same command:\n"
            f"  {command}",
            err=True,
        )
    raise SystemExit(128 + (stop.signal or 0))  # the exit status of shells for a signal
