"""``unsloth-cupy finetune``: a model learns a text."""

import math
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..errors import ConfigError
from ..files import written_beside
from ..memory import format_bytes
from .chat import CHATML_TOKENS, Chat
from .curve import draw_curve
from .generate import stream_text
from .interrupt import Interrupted
from .lessons import Shape, of_records, of_text
from .limit import Memory, Sizes, check_tokens, within
from .machine import blas_threads, console
from .new_model import SIZES, small_llama
from .options import FILE, Device, Number, Size, option
from .records import SUFFIX, Records, read_records
from .run_folder import RunFolder, load_model, model_folder
from .text import Text, read_text
from .tokenizer import load_tokenizer, train_tokenizer
from .trainer import Plan, Trainer

SAMPLE_TOKENS = 120


class Request(NamedTuple):
    """What the command line asks for."""

    model: Path | None
    text: Path | None
    batch: int
    tokens: int
    layers: int | None
    hidden: int | None
    vocabulary: int | None
    pack: bool | None
    find_nan: bool
    device: str | None
    limit: int | None


@click.command()
@click.argument("model", metavar="[MODEL_FOLDER]", required=False, type=FILE)
@option("--text", FILE, "UTF-8 file to learn; .jsonl: in lines.  [default: Python's docs]")
@click.option("--pack/--no-pack", default=None, help="Lines share rows.  [default: --pack]")
@option("--out", FILE, "Folder of the run.  [default: runs/MODEL-TEXT]")
@option("--steps", click.IntRange(1), "Updates of the weights.", 1200)
@option("--lr", Number(0, min_open=True), "Highest learning rate.  [default: by model]")
@option("--batch", click.IntRange(1), "Rows of text in a step.", 4)
@option("--tokens", click.IntRange(2), "Tokens in a row.", 128)
@option("--weight-decay", Number(0), "Share of the weights lost per step and rate.", 0.1)
@option("--max-norm", Number(0, min_open=True), "Norm to clip gradients to.", 1.0)
@option(
    "--dtype",
    click.Choice(["float32", "bfloat16", "float16"]),
    "To compute in; the weights that are learned stay float32.",
    "float32",
)
@option("--lora", click.IntRange(1), "Learn adapters of this rank; the model stays as it is.")
@option("--accumulate", click.IntRange(1), "Batches whose gradients make one step.", 1)
@option("--checkpoint-every", click.IntRange(1), "Keep one block's input in so many: less memory.")
@click.option("--chunked-mlp", is_flag=True, help="Compute MLPs by chunks, twice: less memory.")
@option("--state-bits", click.Choice(["32", "8"]), "Of the optimizer's averages.", "32")
@option("--seed", click.IntRange(0), "Of new weights, the order of the text and the sample.", 0)
@option(
    "--evaluate-every",
    click.IntRange(1),
    "Steps between held-out losses.  [default: a tenth of all]",
)
@option("--save-every", click.IntRange(1), "Steps between checkpoints.", 100)
@option("--device", Device(), "cpu, cuda or cuda:1.", "cpu")
@option("--limit-memory", Size(), "Most that arrays may hold, as 2GiB; planned before training.")
@click.option("--find-nan", is_flag=True, help="Name the layer whose values turn NaN; slower.")
@option("--layers", click.IntRange(1), f"Of a new model.  [default: {SIZES['layers']}]")
@option("--hidden", click.IntRange(1), f"Of a new model.  [default: {SIZES['hidden']}]")
@option("--vocabulary", click.IntRange(1), f"Of a new tokenizer.  [default: {SIZES['vocabulary']}]")
def finetune(
    model: Path | None,
    text: Path | None,
    pack: bool | None,
    out: Path | None,
    steps: int,
    lr: float | None,
    batch: int,
    tokens: int,
    weight_decay: float,
    max_norm: float,
    dtype: str,
    lora: int | None,
    accumulate: int,
    checkpoint_every: int | None,
    chunked_mlp: bool,
    state_bits: str,
    seed: int,
    evaluate_every: int | None,
    save_every: int,
    device: str | None,
    limit_memory: int | None,
    find_nan: bool,
    layers: int | None,
    hidden: int | None,
    vocabulary: int | None,
) -> None:
    """Teach a text to the model in MODEL_FOLDER, or to a new small Llama.

    A .jsonl file holds a text, an instruction or a chat in each line; what is asked there is not
    learned. The run is kept in the folder --out: the same command goes on with a run that was
    stopped.
    """
    from ..models.folder import on_device

    by_lines = text is not None and text.suffix.lower() == SUFFIX
    if pack is not None and not by_lines:
        raise ConfigError(f"--pack and --no-pack are for the lines of a {SUFFIX} file; leave them")
    pack = by_lines and pack is not False
    request = Request(
        model, text, batch, tokens, layers, hidden, vocabulary, pack, find_nan, device,
        limit_memory,
    )  # fmt: skip
    source = None if model is None else model_folder(model)
    if source is not None and (layers or hidden or vocabulary):
        raise ConfigError(
            "--layers, --hidden and --vocabulary describe a new model; leave them out or leave"
            " MODEL_FOLDER out"
        )
    if lora is not None and source is None:
        raise ConfigError("--lora adapts a model that exists; name its MODEL_FOLDER")
    rate = lr or (4e-3 if source is None else 1e-4 if lora is None else 1e-3)
    often = evaluate_every or math.ceil(steps / 10)
    plan = Plan(
        steps, rate, weight_decay, max_norm, seed, often, save_every, dtype, lora, accumulate,
        checkpoint_every, int(state_bits), chunked_mlp,
    )  # fmt: skip
    words = read_records(text) if text is not None and by_lines else read_text(text)
    name = f"{'small-llama' if model is None else model.resolve().name}-{words.name}"
    run = RunFolder(out or Path("runs") / name)
    with on_device("finetune", device), run.claimed(settings(request, plan, words, source)):
        if run.finished:
            click.echo(f"{run.folder} is finished; train anew in another folder with --out\n")
            report(run)
            return
        trainer = prepare(run, request, plan, words, source)
        with blas_threads(trainer.model.config.hidden):
            learn(trainer, name)
            report(run)
            sample(trainer, seed)


def learn(trainer: Trainer, name: str) -> None:
    """Train to the end, or until Ctrl-C; draw the curve; keep the model."""
    run, stopped = trainer.run, False
    try:
        trainer.train()
    except Interrupted:
        stopped = True
    draw_curve(run.curve, run.lines(), name)
    if stopped:
        command = shlex.join(["unsloth-cupy", *sys.argv[1:]])
        click.echo(
            f"stopped after step {trainer.step} of {trainer.plan.steps}, saved in {run.folder};"
            f" go on with the same command:\n  {command}",
            err=True,
        )
        raise SystemExit(130)  # 128 + SIGINT, as shells count
    with written_beside(run.model) as partial:
        trainer.save_model(partial)
    run.drop_checkpoints()


def settings(
    request: Request, plan: Plan, text: Text | Records, source: Path | None
) -> dict[str, Any]:
    """Return what makes the run this run and no other."""
    return {
        "model": None if source is None else str(source.resolve()),
        "text": text.name,
        "text_sha256": text.digest,
        **plan._asdict(),
        "batch": request.batch,
        "tokens": request.tokens,
        **({"pack": request.pack} if isinstance(text, Records) else {}),
        **({} if source else {k: getattr(request, k) or SIZES[k] for k in SIZES}),
    }


def prepare(
    run: RunFolder, request: Request, plan: Plan, text: Text | Records, source: Path | None
) -> Trainer:
    """Load or create model and tokenizer, at the newest checkpoint if there is one."""
    from .. import models

    checkpoint = run.newest_checkpoint()
    folder, chat = checkpoint or source, Chat(checkpoint or source)
    chatty = isinstance(text, Records) and text.chats
    if folder is None:
        size = {key: getattr(request, key) or SIZES[key] for key in SIZES}
        tokenizer = train_tokenizer(text.words, size["vocabulary"], CHATML_TOKENS if chatty else ())
        config = small_llama(tokenizer, request.tokens, size["layers"], size["hidden"])
        model = models.create(config, seed=plan.seed, dtype="float32", device=request.device)
    else:
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, dtype="float32", device=request.device)
        if plan.lora is not None and folder == source:
            if model.adapter is not None:
                raise ConfigError(
                    f"{source} holds adapters, which go on to learn; leave --lora out"
                )
            model.add_adapter(plan.lora, seed=plan.seed, base=str(folder.resolve()))
    vocabulary, positions = model.config.vocab, model.config.positions
    check_tokens(request.tokens, positions)
    sizes = Sizes(
        model.config, request.batch, request.tokens, request.device, source is not None,
        model.adapter,
    )  # fmt: skip
    memory = Memory(within(sizes, plan, request.limit), request.limit, request.device)
    pad = model.config.pad_token
    shape = Shape(
        request.batch, request.tokens, bool(request.pack),
        pad if pad is not None and pad < vocabulary else 0,
    )  # fmt: skip
    if isinstance(text, Records):
        lessons = of_records(text, tokenizer, model.config, shape, plan.seed, chat)
    else:
        lessons = of_text(text, tokenizer, model.config, shape, plan.seed)
    files = chat.keep() if chatty else chat.files
    trainer = Trainer(
        run, model, tokenizer, lessons, plan, files, memory, find_nan=request.find_nan
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
        click.echo(f"going on from {checkpoint}", err=True)
    announce(trainer)
    return trainer


def announce(trainer: Trainer) -> None:
    """Say what learns what."""
    model, lessons = trainer.model, trainer.lessons
    count = sum(array.size for array in model.parameters.values())
    learned = sum(array.size for array in model.trainable.values())
    adapted = f", adapters of {learned:,}" if model.adapter else ""
    if lessons.told:
        click.echo(lessons.told, err=True)
    click.echo(
        f"{model.config.model_type} of {count:,} parameters{adapted}; {lessons.learned:,} tokens to"
        f" learn, {lessons.asked:,} held out; {trainer.run.folder}",
        err=True,
    )


def report(run: RunFolder) -> None:
    """Print the result of a run."""
    from rich.table import Table

    lines = run.lines()
    last = next(line for line in reversed(lines) if "held_out_loss" in line)
    loss, baseline = last["held_out_loss"], last["unigram_baseline"]
    steps = [line for line in lines if "loss" in line]
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("unigram baseline", f"{baseline:.3f} nats per token")
    side = "below" if loss < baseline else "above"
    table.add_row("held-out loss", f"{loss:.3f} nats per token, {abs(baseline - loss):.3f} {side}")
    table.add_row("perplexity", f"{math.exp(loss):.1f} (baseline {math.exp(baseline):.1f})")
    seconds = sum(line["seconds"] for line in steps)
    speed = sum(line["tokens_per_second"] * line["seconds"] for line in steps) / seconds
    table.add_row("time", f"{seconds:.0f} s in {len(steps)} steps, {speed:.0f} tokens/s")
    counted = [line for line in steps if "peak_bytes" in line]
    if counted:
        planned, peak = counted[-1]["planned_bytes"], counted[-1]["peak_bytes"]
        off = f"{100 * (planned - peak) / max(peak, 1):+.1f} %"
        told = f"planned {format_bytes(planned)}, measured {format_bytes(peak)} ({off})"
        table.add_row("arrays of a step", told)
    table.add_row("peak of the process", format_bytes(max(line["memory_bytes"] for line in steps)))
    table.add_row("model", str(run.model))
    table.add_row("loss curve", str(run.curve))
    table.add_row("numbers", str(run.log))
    console(markup=False).print(table)


def sample(trainer: Trainer, seed: int) -> None:
    """Print how the model goes on from the beginning of what was held out."""
    tokens = trainer.lessons.prompt
    click.echo("\nsampled text:\n")
    stream_text(
        trainer.model, trainer.tokenizer, trainer.tokenizer.decode(tokens), tokens,
        max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_p=0.95, seed=seed,
    )  # fmt: skip
