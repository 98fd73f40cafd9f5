"""What a run begins with: model, tokenizer and lessons, once its memory is planned."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from .. import models
from ..errors import ConfigError
from ..models.parse import parse
from .chat import CHATML_TOKENS, Chat
from .lessons import Shape, of_records, of_text
from .limit import Memory, Sizes, check_tokens, quantized_kind, within
from .new_model import ONLINE, SIZES, small_llama
from .progress import reading
from .ranks import Ranks
from .records import Records
from .results import announce
from .run_folder import RunFolder, model_without_weights
from .settings import Settings
from .text import Lessons, Text
from .tokenizer import load_tokenizer, train_tokenizer
from .trainer import Trainer


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
    epochs: float | None = None
    evaluate_every: int | None = None
    train_weights: bool = False  # of a new model whose layers are rounded as BitNet's


def prepare(
    run: RunFolder,
    request: Request,
    plan: Settings,
    text: Text | Records,
    source: Path | None,
    ranks: Ranks,
) -> Trainer:
    """Load or create model and tokenizer, at the newest checkpoint if there is one."""
    checkpoint = run.newest_checkpoint()
    folder, chat = checkpoint or source, Chat(checkpoint or source)
    chatty = isinstance(text, Records) and text.chats
    adds = plan.lora is not None and folder == source
    values: dict[str, Any] = {}
    if folder is None:
        size = {key: getattr(request, key) or SIZES[key] for key in SIZES}
        special = CHATML_TOKENS if chatty else ()
        tokenizer = one_tokenizer(text, size["vocabulary"], special, ranks)
        values = small_llama(tokenizer, request.tokens, size["layers"], size["hidden"])
        values |= {"quantization_config": ONLINE} if request.train_weights else {}
        config, adapter, kind = parse(values), None, None
    else:
        tokenizer = load_tokenizer(folder)
        config, adapter, kind = model_without_weights(folder)
        kind = quantized_kind(source, plan.quantize, plan.lora, adapter, kind)
        if adds and adapter is not None:
            raise ConfigError(f"{source} holds adapters, which go on to learn; leave --lora out")
    check_tokens(request.tokens, config.positions)
    pad = config.pad_token
    shape = Shape(
        request.batch, request.tokens, bool(request.pack),
        pad if pad is not None and pad < config.vocab else 0,
    )  # fmt: skip
    if isinstance(text, Records):  # lines may be shorter than rows: first, how long they are
        lessons = of_records(text, tokenizer, config, shape, plan.seed, chat)
    there, device = source is not None and not config.bit_layers, request.device
    rows = (shape.batch, shape.length) if isinstance(text, Text) else lessons.largest
    sizes = Sizes(config, *rows, device, there, adapter, kind)
    made = within(sizes, plan, request.limit) if ranks.whole else sizes.planned(plan)
    memory = Memory(made, request.limit, device, counts=ranks.alone)
    where: dict[str, Any] = {"dtype": "float32", "device": device, **ranks.placing}
    if folder is None:
        model = models.create(values, seed=plan.seed, **where)
    else:
        model = models.load(folder, quantize=plan.quantize, **where)
        if adds and plan.lora is not None:
            model.add_adapter(plan.lora, seed=plan.seed, base=str(folder.resolve()))
    if isinstance(text, Text):
        lessons = of_text(text, tokenizer, config, shape, plan.seed)
    plan = with_steps(plan, request, lessons)
    files = chat.keep() if chatty else chat.files
    trainer = Trainer(
        run, model, tokenizer, lessons, plan, files, memory, find_nan=request.find_nan, ranks=ranks
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
        click.echo(f"going on from {checkpoint}", err=True)
    lessons.batches.where(trainer.step * plan.accumulate)  # an epoch is drawn before steps count
    announce(trainer)
    return trainer


def with_steps(plan: Settings, request: Request, lessons: Lessons) -> Settings:
    """Return a plan of so many steps as the epochs that were asked for have."""
    if request.epochs is not None:
        batches = lessons.batches.count(request.epochs)
        plan = plan._replace(steps=max(1, math.ceil(batches / plan.accumulate)))
        click.echo(f"{request.epochs:g} epochs are {plan.steps} steps", err=True)
    return plan._replace(evaluate_every=request.evaluate_every or math.ceil(plan.steps / 10))


def one_tokenizer(
    text: Text | Records, vocabulary: int, special: Sequence[str], ranks: Ranks
) -> Any:
    """Return a new tokenizer, which rank 0 makes for all."""
    made = train_tokenizer(shown(text), vocabulary, special) if ranks.first else None
    if ranks.alone:
        return made
    from tokenizers import Tokenizer

    return Tokenizer.from_str(ranks.told("" if made is None else made.to_str()))


def shown(text: Text | Records) -> Iterator[str]:
    """Yield what a new tokenizer is made for, and show how far it is."""
    yield from (part for _, part in reading(text.blocks(), text.size, "making a tokenizer"))
