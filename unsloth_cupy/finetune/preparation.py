"""Prepares a run: plans its memory, then loads or creates model, tokenizer and batches."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from .. import models
from ..errors import ConfigError
from ..models.parse import parse
from .chat import CHATML_TOKENS, Chat
from .limit import Memory, Sizes, check_tokens, checked_plan, quantized_kind
from .loop import Loop
from .naming import named
from .new_model import ONLINE, SIZES, small_llama
from .progress import reading
from .ranks import Ranks
from .records import Records
from .results import announce
from .run_folder import RunFolder, model_without_weights
from .settings import Settings
from .text import Text, TrainingData
from .tokenizer import load_tokenizer, train_tokenizer
from .training_data import Shape, from_records, from_text


class Request(NamedTuple):
    """The options of the command line that are not part of Settings."""

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
    epochs: float | None = None
    evaluate_every: int | None = None
    train_weights: bool = False  # the new model's layers round their weights, as in BitNet


def prepare(
    run: RunFolder,
    request: Request,
    plan: Settings,
    text: Text | Records,
    source: Path | None,
    ranks: Ranks,
) -> Loop:
    """Return a trainer with model and tokenizer, loaded from the newest checkpoint if any."""
    checkpoint = run.newest_checkpoint()
    folder, chat = checkpoint or source, Chat(checkpoint or source)
    has_chats = isinstance(text, Records) and text.chats
    new_adapter = plan.lora is not None and folder == source
    values: dict[str, Any] = {}
    if folder is None:
        size = {key: getattr(request, key) or SIZES[key] for key in SIZES}
        special = CHATML_TOKENS if has_chats else ()
        tokenizer = new_tokenizer(text, size["vocabulary"], special, ranks)
        values = small_llama(tokenizer, request.tokens, size["layers"], size["hidden"])
        values |= {"quantization_config": ONLINE} if request.train_weights else {}
        config, adapter, kind = parse(values), None, None
    else:
        tokenizer = load_tokenizer(folder)
        config, adapter, kind = model_without_weights(folder)
        kind = quantized_kind(source, plan.quantize, plan.lora, adapter, kind)
        if new_adapter and adapter is not None:
            raise ConfigError(
                f"{source} holds adapters, which are trained further; leave {named('lora')} out"
            )
    check_tokens(request.tokens, config.positions)
    pad = config.pad_token
    shape = Shape(
        request.batch, request.tokens, bool(request.pack),
        pad if pad is not None and pad < config.vocab else 0,
    )  # fmt: skip
    if isinstance(text, Records):  # before the plan: lines may be shorter than rows
        training_data = from_records(text, tokenizer, config, shape, plan.seed, chat)
    exists, device = source is not None and not config.bit_layers, request.device
    rows = (shape.batch, shape.length) if isinstance(text, Text) else training_data.largest
    sizes = Sizes(config, *rows, device, exists, adapter, kind)
    step_plan = checked_plan(sizes, plan, request.limit) if ranks.whole else sizes.planned(plan)
    memory = Memory(step_plan, request.limit, device, counts=ranks.alone)
    where: dict[str, Any] = {"dtype": "float32", "device": device, **ranks.placing}
    if folder is None:
        model = models.create(values, seed=plan.seed, **where)
    else:
        model = models.load(folder, quantize=plan.quantize, **where)
        if new_adapter and plan.lora is not None:
            model.add_adapter(plan.lora, seed=plan.seed, base=str(folder.resolve()))
    if isinstance(text, Text):
        training_data = from_text(text, tokenizer, config, shape, plan.seed)
    plan = with_steps(plan, request, training_data)
    files = chat.keep() if has_chats else chat.files
    trainer = Loop(
        run,
        model,
        tokenizer,
        training_data,
        plan,
        files,
        memory,
        find_nan=request.find_nan,
        ranks=ranks,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
        click.echo(f"resuming from {checkpoint}", err=True)
    # shuffle now, before memory is measured
    training_data.batches.where(trainer.step * plan.accumulate)
    announce(trainer)
    return trainer


def with_steps(plan: Settings, request: Request, training_data: TrainingData) -> Settings:
    """Return the settings with the steps of its epochs, and the default of ``evaluate_every``."""
    if request.epochs is not None:
        batches = training_data.batches.count(request.epochs)
        plan = plan._replace(steps=max(1, math.ceil(batches / plan.accumulate)))
        click.echo(f"{request.epochs:g} epochs are {plan.steps} steps", err=True)
    return plan._replace(evaluate_every=request.evaluate_every or math.ceil(plan.steps / 10))


def new_tokenizer(
    text: Text | Records, vocabulary: int, special: Sequence[str], ranks: Ranks
) -> Any:
    """Return a new tokenizer, which rank 0 trains for all ranks."""
    tokenizer = train_tokenizer(blocks_of(text), vocabulary, special) if ranks.first else None
    if ranks.alone:
        return tokenizer
    from tokenizers import Tokenizer

    return Tokenizer.from_str(ranks.broadcast("" if tokenizer is None else tokenizer.to_str()))


def blocks_of(text: Text | Records) -> Iterator[str]:
    """Yield the text that a new tokenizer is trained on, and show the progress."""
    yield from (part for _, part in reading(text.blocks(), text.size, "training a tokenizer"))
