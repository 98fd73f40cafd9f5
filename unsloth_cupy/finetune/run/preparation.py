"""Prepares a run: plans its memory, then loads or creates model, tokenizer and batches."""

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import models
from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...files import read_json
from ...models.adapters.adapter_base import ADAPTER, BASE, base_name, base_of
from ...models.adapters.adapter_folder import read_adapter
from ...models.adapters.into import MERGE_INTO, Into
from ...models.adapters.outer_folder import base_for, implied_head, with_labels
from ...models.configs.config_files import GENERATION, read_config
from ...models.configs.heads import CLASSIFIERS
from ...models.configs.names import ADAPTED, SCORE, TABLE
from ...models.folders.checkpoint_files import find_tensors
from ...models.folders.pooling import pooling_of
from ...models.gguf.export import check_tokenizer, why_no_file
from ...models.gguf.opening import source_of
from ...models.objective import Objective, next_token
from ...models.parse import parse
from ...models.quantizer import kind_of
from ...models.text.chat import CHATML_TOKENS
from ...models.text.tokenizer import FILE, Tokenizer, load_tokenizer
from ...ops.quantized.weight import Quantized
from ...placement import to_device_of
from ..data.chat import Chat
from ..data.records import Record, Records
from ..data.spans import encoded
from ..data.text import Text, TrainingData
from ..data.tokenizer import train_tokenizer
from ..data.training_data import Shape, ends_of, from_records, from_text
from ..data.turns import ending
from ..listener import announce, reading
from ..methods.embedding_method import Embed
from ..methods.method import Method
from ..methods.registry import METHODS
from ..naming import named
from .limit import (
    Memory,
    Sizes,
    check_tokens,
    checked_plan,
    passes_of,
    quantized_kind,
    texts_by_sums,
    with_savings,
)
from .loop import Loop
from .new_model import ONLINE, SIZES, small_llama
from .new_tokens import account as account_of
from .new_tokens import add_tokens, rows_with
from .ranks import Ranks, chunks_of
from .reference import add_reference, add_taught, other_models, reference_known, with_teacher
from .resume import OUTLIER
from .run_folder import Facts, RunFolder, model_without_weights, words_folder
from .settings import FLOAT, HALVES, Plan, Settings

if TYPE_CHECKING:
    from ...models.configs.config import Config

MOST_STEPS = 1000  # limit for the defaults of 3 and 2 epochs
SHARE_OF_ROWS = 0.99  # share of rows that fit the default length, if there are outliers
COUNTED_ROWS, LONGEST_ROWS = 2000, 100  # rows to tokenise in a large file: sample, longest


def prepare(
    run: RunFolder,
    settings: Settings,
    text: Text | Records,
    source: Path | None,
    ranks: Ranks,
    objective: Objective = next_token,
    transformer: models.Transformer | None = None,
) -> Loop:
    """Return a loop with model, tokenizer and data; load the newest checkpoint if there is one.

    ``transformer`` is the model if it is in memory; ``source`` is then its original folder.
    """
    plan, checkpoint = settings.decided(new=source is None), run.newest_checkpoint()
    folder, method = checkpoint or source, fitted(plan, text, source, transformer)
    words = (
        transformer.words  # an adapter may have its own tokens
        if transformer and transformer.words and not checkpoint
        else folder and words_folder(folder, plan.base)
    )
    chat = Chat(words)
    has_chats = isinstance(text, Records) and text.chats
    new_adapter = plan.lora is not None and folder == source
    values: dict[str, Any] = {}
    if folder is None or words is None:
        size = {key: getattr(plan, key) or SIZES[key] for key in SIZES}
        special = CHATML_TOKENS if has_chats else ()
        tokenizer = new_tokenizer(text, size["vocabulary"], special, ranks)
        values = small_llama(tokenizer, plan.tokens, size["layers"], size["hidden"])
        values |= {"quantization_config": ONLINE} if plan.train_weights else {}
        config, adapter, kind = parse(values), None, None
    else:
        tokenizer = load_tokenizer(words)
        config, adapter, kind = facts_of(
            folder, words, plan, transformer, source, method, new_adapter=new_adapter
        )
    settings, config = with_new_tokens(settings, tokenizer, config, adapter, ranks)
    settings = with_tokens(settings, text, tokenizer, chat, config, method, run.outlier)
    plan = settings.decided(new=source is None)
    check_tokens(plan.tokens, config.positions)
    others = other_models(plan, tokenizer, config.vocab)
    objective = objective if plan.method == "sft" else with_teacher(method, others, tokenizer)
    shape = shape_of(plan, text, config, method)
    if isinstance(text, Records):  # before the memory plan: examples may be shorter than rows
        data = from_records(text, tokenizer, config, shape, plan.data_seed, chat)
        training_data = add_taught(objective, data, shape, text.place)
        plan = with_steps(settings, plan, training_data, new=source is None)
    rows = (shape.batch, shape.length) if isinstance(text, Text) else training_data.largest
    sizes = Sizes(
        config, 1 if plan.by_text else rows[0], rows[1], ranks.device,
        source is not None and not config.bit_layers, adapter, kind, objective,
    )  # fmt: skip
    plan, memory = planned_memory(
        sizes, plan, ranks, None if isinstance(text, Text) else training_data
    )
    compared = others.get("reference", source)
    has_reference = method.compares and reference_known(
        run, plan, training_data.examples, compared, shape, ranks, goes_on=checkpoint is not None
    )
    objective = (
        with_teacher(objective, others, tokenizer, plan.dtype, ranks.device)
        if plan.method != "sft" and (ranks.judges if method.is_on_policy else ranks.losses)
        else objective
    )
    model = (
        in_place(transformer, checkpoint, plan.quantize)
        if transformer
        else new_or_loaded(folder, values, plan, ranks, **method.loading)
    )
    model.tokenizer = Tokenizer.of(tokenizer, chat)
    add_adapters(model, plan, config.vocab, new=new_adapter)
    if isinstance(text, Text):
        training_data = from_text(text, tokenizer, config, shape, plan.data_seed)
        plan = with_steps(settings, plan, training_data, new=source is None)
    loop = Loop(
        run, model, tokenizer, training_data, plan,
        chat.keep() | ends_file(model, chat, tokenizer) if has_chats else chat.files,
        memory, ranks, objective, chat if has_chats else None,
    )  # fmt: skip
    loop.check()
    if method.compares:
        add_reference(loop, compared, shape, known=has_reference)
    if checkpoint is not None:
        loop.resume(checkpoint)
        announce(f"resuming from {checkpoint}")
    # shuffle before memory is measured
    loop.training_data.batches.where(loop.method.first(loop.step, plan.accumulate))
    announce(summary(loop))
    return loop


def planned_memory(
    sizes: Sizes, plan: Plan, ranks: Ranks, lines: TrainingData | None
) -> tuple[Plan, Memory]:
    """Return the settings, changed if a step needs that, and the memory measurement of steps.

    Steps on ``lines`` differ in size: on a single rank, their actual batches are planned instead of
    full rows.  Ranks that divide weights are planned as one device with their rows, which is the
    most that offload needs on the host.
    """
    rows, tokens = -(-sizes.batch // ranks.data.size), -(-sizes.tokens // ranks.groups.context.size)
    texts = -(-plan.batch // ranks.data.size)  # with by_text, a batch has all rows of a step
    beside, stages = ranks.beside(), ranks.groups.pipeline.size
    if ranks.schedule == "gpipe":  # a stage holds the inputs of all passes; else of one per stage
        beside *= -(-plan.accumulate // stages)
    if ranks.schedule == "interleaved":  # of 1 + 1 / chunks passes: later chunks begin before
        parts = chunks_of(ranks.schedule, ranks.chunks)
        beside = -(-beside * (parts + 1) // parts)
    sizes = sizes._replace(batch=rows, tokens=tokens, beside=beside, whole=ranks.whole, texts=texts)
    plan = with_savings(sizes, plan)
    limit, device, largest, bytes_of = plan.limit_memory, sizes.device, 0, None
    if ranks.alone and lines is not None and not METHODS[plan.method].is_on_policy:

        def of_step(step: int) -> Sizes:
            own: Any = METHODS["sft"] if plan.method == "sft" else sizes.objective
            if plan.by_text:
                return full._replace(inputs=texts_by_sums(lines, step, own))
            padded = device is not None and plan.graph is not False
            passes = passes_of(lines, step, plan.accumulate, own, padded=padded)
            return full._replace(inputs=passes)

        def bytes_of(step: int) -> int:
            return of_step(step).planned(plan).total

        full, candidates = (
            sizes,
            lines.batches.largest(plan.steps, plan.accumulate, by_text=plan.by_text),
        )
        largest = max(candidates, key=bytes_of) if len(candidates) > 1 else candidates[0]
        sizes = of_step(largest)
    step_plan = checked_plan(sizes, plan, limit)
    memory = Memory(
        step_plan,
        limit,
        device,
        counts=ranks.alone,
        largest=largest,
        bytes_of=bytes_of,
    )
    return plan, memory


def new_or_loaded(
    folder: Path | None, values: dict[str, Any], plan: Plan, ranks: Ranks, **head: Any
) -> models.Transformer:
    """Load the model in a folder, with a head; without a folder, create one from ``values``."""
    where: dict[str, Any] = {"dtype": "float32", "device": ranks.device, **ranks.placing}
    if folder is None:
        return models.create(values, seed=plan.seed, **where)
    where |= head | {"seed": plan.seed}
    base = base_of(folder, plan.base)
    if base is None:
        return models.load(folder, quantize=plan.quantize, **where)
    model = models.load(base, lora=folder, quantize=plan.quantize, **where)
    if plan.base is not None and model.adapter is not None:  # the adapter names the old path
        model.adapter.settings[BASE] = base_name(model.texts["config.json"], base)
    return model


def facts_of(
    folder: Path,
    words: Path,
    plan: Plan,
    transformer: models.Transformer | None,
    source: Path | None,
    method: Method,
    *,
    new_adapter: bool,
) -> Facts:
    """Return the properties of a model as the plan trains it; raise if they do not fit the plan.

    The model is in ``folder`` (in a new run: ``source``) or in memory.
    """
    source = source_of(source) if isinstance(source, Path) else source  # as the user named it
    facts = _facts_of(folder, plan, transformer, method)
    _check_head(facts, source, transformer, method, named(method=plan.method))
    into = None if facts.adapter is None else facts.adapter.into
    quantize = plan.quantize or (None if into is None else into.quantize)
    kind = quantized_kind(source, quantize, plan.lora, facts.adapter, facts.quantized)
    if plan.merge_into is not None:
        shown = named(merge_into=plan.merge_into)
        if plan.lora is None and facts.adapter is None:
            cure = f"add {named('lora')}, as in {named(lora=16)}"
            raise ConfigError(f"{shown} requires adapters; {cure}")
        into_file = Into(shown, facts.config, plan.merge_into)  # raises for models it cannot store
        if not into_file.in_folder and (words / FILE).is_file():
            check_tokenizer(shown, words, facts.config)
    if new_adapter and facts.adapter is not None:
        cure = f"leave {named('lora')} out"
        holder = source if transformer is None else "the model"
        raise ConfigError(f"{holder} already has adapters, which are trained further; {cure}")
    if method.head is None and (reason := why_no_file(facts.config)):
        announce(f"the model cannot be exported to GGUF for llama.cpp: {reason}")
    return facts._replace(quantized=kind)


def fitted(
    plan: Plan, text: Text | Records, source: Path | None, transformer: models.Transformer | None
) -> Method:
    """Return the method of a plan, completed from the data (labels, number of classes)."""
    if source is None or isinstance(text, Text):
        return plan.learning
    learning = plan.learning.fitted(text, values_of(source, plan, transformer))
    if isinstance(learning, Embed) and not learning.loss_options.get("pooling"):
        learning = dataclasses.replace(learning, of_folder=pooling_of(source))
    return learning


def values_of(
    source: Path, plan: Plan, transformer: models.Transformer | None = None
) -> Mapping[str, Any]:
    """Return the config.json of a model, with the labels of its adapter if any."""
    if transformer is not None:
        return transformer.texts["config.json"]
    base = base_of(source, plan.base)
    if base is None:
        return read_config(source)[1]["config.json"]
    texts = read_config(base, *implied_head(source, base, None))[1]
    return with_labels(source, texts["config.json"])


def _facts_of(
    folder: Path, plan: Plan, transformer: models.Transformer | None, method: Method
) -> Facts:
    """Return the properties of the model in a folder, or of one in memory."""
    if transformer is None:
        facts = model_without_weights(folder, plan.base, **method.loading)
        # raise before the memory plan if weights are missing or have other sizes
        base = base_of(folder, plan.base) or folder
        config, _, choice = read_config(base, **method.loading)
        find_tensors(base, config, choice)
        return facts
    if transformer.adapter is not None and transformer.adapter.initial:
        problem = "the adapter was initialised from the model's weights, which a run does not store"
        cure = "save it with save_adapter as a plain adapter of twice the rank, and train that one"
        raise ConfigError(f"Trainer: {problem}; {cure}")
    values: Iterable[Any] = transformer.parameters.values()
    weight = next((value for value in values if isinstance(value, Quantized)), None)
    return Facts(transformer.config, transformer.adapter, kind_of(weight))


def _check_head(
    facts: Facts,
    source: Path | None,
    transformer: models.Transformer | None,
    method: Method,
    shown: str,
) -> None:
    """Raise a ConfigError for a model whose head does not fit the method."""
    loading, config = method.loading, facts.config
    if transformer is not None and loading and (config.head, config.labels) != (
        loading["head"], loading["labels"] or 0
    ):  # fmt: skip
        call = ", ".join(f"{name}={value!r}" for name, value in loading.items() if value)
        problem = f"{shown} needs another head than the model's ({config.head})"
        raise ConfigError(f"{problem}; load it with models.load(folder, {call})")
    adapted = {ADAPTED + SCORE} if facts.adapter is None else facts.adapter.parameters
    if loading.get("head") in CLASSIFIERS and ADAPTED + SCORE not in adapted:
        cure = "merge it first: unsloth-cupy merge, or models.merge"
        raise ConfigError(f"{source} has adapters without the head of {shown}; {cure}")


def add_adapters(model: models.Transformer, plan: Plan, rows: int, *, new: bool) -> None:
    """Resize the embedding to ``rows``; then add the adapters of a plan, if they are ``new``."""
    if rows > model.config.vocab:
        model.resize(rows)
    if model.division is not None:
        read = model.adapter is not None and model.adapter.dropout > 0
        if plan.lora_dropout or read:
            cure = f"leave {named('lora_dropout')} out"
            cure = "set it to 0 in adapter_config.json" if read else cure
            problem = "is not supported when ranks split the model"
            raise ConfigError(f"{named('lora_dropout')} {problem}; {cure}")
    if plan.adapters is None or not new:
        _train_through(model, plan)
        return
    options = plan.adapters.options(model.config, plan.trained_tokens)
    model.add_adapter(**options, seed=plan.seed)
    if model.adapter is not None:  # the order of an adapter file, so that sums have equal bits
        model.adapter.parameters = dict(sorted(model.adapter.parameters.items()))
    _train_through(model, plan)


def _train_through(model: models.Transformer, plan: Plan) -> None:
    """Train the adapter through the quantizer of the plan, or of the adapter itself."""
    adapter = model.adapter
    if adapter is None or (adapter.into is None and plan.merge_into is None):
        return
    if adapter.into is None and plan.merge_into is not None:
        model.train_through(plan.merge_into)
    elif plan.merge_into not in (None, *adapter.into.names):
        problem = f"the adapter was trained through {adapter.into.kind}"
        cure = f"leave {named('merge_into')} out, or start from the base"
        raise ConfigError(f"{named(merge_into=plan.merge_into)}: {problem}; {cure}")
    announce(
        f"training through the {adapter.into.kind} quantizer: use the merged file, not the adapter"
        " alone"
    )


def in_place(
    model: models.Transformer, folder: Path | None, quantize: str | None = None
) -> models.Transformer:
    """Change a model in memory: cast it to float32, and load trained weights from a folder.

    ``quantize`` is the kind to which frozen weights are quantized, if any.
    """
    adapted = folder is not None and (folder / ADAPTER).exists()
    if folder is not None and not adapted:
        loaded = models.load(folder, device=device_name(model))
        if loaded.config.vocab != model.config.vocab:
            model.resize(loaded.config.vocab)
        model.parameters = loaded.parameters
    values: dict[str, Any] = model.parameters
    for name, value in values.items():
        if not isinstance(value, Quantized) and value.dtype != FLOAT32:
            values[name] = value.astype(FLOAT32)
    if folder is not None and adapted:
        base, model.adapter = None if model.adapter is None else model.adapter.base, None
        rows = base_for(folder, model.config, {**model.texts}, {}).vocab
        if rows != model.config.vocab:
            model.resize(rows)
        own = partial(to_device_of, like=model.table)
        model.adapter = read_adapter(folder, model.config, FLOAT32, own)
        model.adapter.base = base or model.home
    if quantize is not None:
        models.quantize(model, quantize)
    return model


def device_name(model: models.Transformer) -> str:
    """Return the device of a model by its name in ``models.load``."""
    table: Any = model.table
    return "cpu" if isinstance(table, np.ndarray) else f"cuda:{table.device.id}"


def dtype_of(
    settings: Settings,
    source: Path | None,
    transformer: models.Transformer | None,
    ranks: Ranks,
) -> str:
    """Return the compute dtype: from the settings, else by device and model.

    On a CPU the default is float32.  On a GPU it is the dtype of the model, if that has 16 bits,
    else bfloat16.  If an adapter is trained through the quantizer of a file, a float32 model stays
    float32, because the quantizer needs its exact weights.
    """
    if settings.dtype is not None:
        return settings.dtype
    chosen = FLOAT
    if ranks.first and ranks.device is not None:
        stored, through = "", settings.merge_into is not None
        if transformer is not None:
            stored = transformer.dtype.name
            through |= transformer.adapter is not None and transformer.adapter.into is not None
        elif source is not None:
            base = base_of(source, settings.base)
            through |= base is not None and MERGE_INTO in read_json(source / ADAPTER)
            config, _, choice = read_config(base or source)
            table = find_tensors(base or source, config, choice)[0][TABLE].dtype
            stored = "" if table is None else table.name
        chosen = stored if stored in HALVES else FLOAT if through else HALVES[0]
    return str(ranks.broadcast(chosen))


def with_steps(settings: Settings, plan: Plan, training_data: TrainingData, *, new: bool) -> Plan:
    """Announce targets and steps; return the plan with the steps of its epochs.

    Without epochs and steps, an existing model is trained for 3, 2 or 1 epochs: the largest number
    with at most 1,000 steps.
    """
    notes = [training_data.note] if training_data.note else []
    epochs, count = settings.epochs, training_data.batches.count
    chosen = epochs is None and settings.steps is None and not new

    def steps_of(epochs: float) -> int:
        return max(1, plan.learning.steps(count(epochs), plan.accumulate))

    if chosen:
        epochs = next((n for n in (3, 2) if steps_of(n) <= MOST_STEPS), 1)
    if epochs is not None:
        steps, change = steps_of(epochs), f" (set {named('epochs')} or {named('steps')} to change)"
        notes.append(
            f"training for {float(epochs)} epochs = {steps:,} step{'s' * (steps > 1)}"
            f"{change * chosen}"
        )
        plan = settings.decided(new=new, steps=steps)
    if notes:
        announce("\n".join(notes))
    return plan


def ends_file(model: models.Transformer, chat: Chat, tokenizer: Any) -> dict[str, str]:
    """Return generation_config.json with the end token of answers, if they end with one token."""
    try:
        end = ending(chat, tokenizer, model.config.end_tokens).token
    except ConfigError:  # the template rejects a chat of one question and one answer
        end = None
    if end is None:
        return {}
    ends = [*dict.fromkeys((*model.config.end_tokens, end))]
    values = {**model.texts.get(GENERATION, {}), "eos_token_id": ends if len(ends) > 1 else end}
    return {GENERATION: json.dumps(values, indent=2) + "\n"}


def shape_of(plan: Plan, text: Text | Records, config: "Config", method: Method) -> Shape:
    """Return the shape of a batch."""
    pack = isinstance(text, Records) and plan.pack is not False
    pack = pack and not method.is_on_policy  # a batch has a fixed number of prompts
    return Shape(plan.batch, plan.tokens, pack, padding(config), method)


def padding(config: "Config") -> int:
    """Return the padding token of a model; 0 if it has none, or one without a row in the table."""
    pad = config.pad_token
    return pad if pad is not None and pad < config.vocab else 0


def with_new_tokens(
    settings: Settings, tokenizer: Any, config: "Config", adapter: Any, ranks: Ranks
) -> "tuple[Settings, Config]":
    """Add the tokens of ``new_tokens`` to a tokenizer; return the changed settings and config."""
    if settings.new_tokens is None:
        return settings, config
    shown = named(new_tokens=str(settings.new_tokens))
    tokens = add_tokens(tokenizer, settings.new_tokens)
    rows = rows_with(config, tokens)
    if not ranks.whole and rows > config.vocab:
        problem = "each rank stores a part of the embedding, which must grow"
        cure = f"use {named('data_parallel')} alone, or resize(vocab) and save the model first"
        raise ConfigError(f"{shown}: {problem}; {cure}")
    known = () if adapter is None else adapter.tokens.get(TABLE, ())
    if adapter is not None and not {*tokens} <= {*known}:
        cure = "merge it first: unsloth-cupy merge, or models.merge"
        raise ConfigError(f"{shown}: the model has adapters that do not train these tokens; {cure}")
    changed = dataclasses.replace(settings, trained_tokens=tokens)
    return changed, dataclasses.replace(config, vocab=rows)


def with_tokens(
    settings: Settings,
    records: Text | Records,
    tokenizer: Any,
    chat: Chat,
    config: "Config",
    method: Method = METHODS["sft"],
    outlier: float = OUTLIER,
) -> Settings:
    """Return settings with a row length; the default is the length of the longest example.

    If the longest example has more than ``outlier`` times the 99th percentile, the default is the
    99th percentile.  In a large file, only a sample and the examples with the most characters are
    tokenised.  The positions of the model are the upper limit.
    """
    if settings.tokens is not None or isinstance(records, Text):
        return settings
    lengths_of = partial(lengths_in, records, tokenizer, chat, config, method)
    lengths, longest = list[int](), 0
    for part in (records.train, records.held_out):
        step = -(-len(part) // COUNTED_ROWS) or 1
        counted = lengths_of(part[::step])
        lengths = lengths or counted
        if step > 1:
            counted += lengths_of(nlargest(LONGEST_ROWS, part, key=lambda row: len(row.content())))
        longest = max([longest, *counted])
    share = math.ceil(float(np.quantile(lengths, SHARE_OF_ROWS)))
    needed, why = longest, "fits the longest example"
    if longest > outlier * share:
        needed, why = share, f"covers {100 * SHARE_OF_ROWS:.0f} % of the examples"
    if needed > config.positions:
        needed = config.positions
        why = f"all positions of the model; the longest example has {longest:,} tokens"
    tokens = max(2, needed)
    announce(f"maximum length {tokens:,} tokens: {why} (set {named('tokens')} to change)")
    return dataclasses.replace(settings, tokens=tokens)


def lengths_in(
    records: Records,
    tokenizer: Any,
    chat: Chat,
    config: "Config",
    method: Method,
    part: Iterable[Record],
) -> list[int]:
    """Return the length in tokens of each text of a part of the records, with new tokens."""
    ends = [] if method.is_on_policy else ends_of(records, tokenizer, config, chat)
    return [
        len(encoded(tokenizer, text, spans, bool(record.messages), ends, chat)[0])
        + method.max_new_tokens
        for record in part
        for side in record.sides
        for text, spans, _ in records.texts(side, chat)
    ]


def summary(loop: Loop) -> str:
    """Return in words the model, target tokens and folder of a run."""
    model, training_data = loop.model, loop.training_data
    whole = model.config if model.division is None else model.division.whole
    count = sum(map(math.prod, whole.shapes().values()))
    trained = "all trainable"
    if model.adapter:
        kind = "DoRA" if model.adapter.settings.get("use_dora") else "LoRA"
        trained = f"{compact(trainable_count(model))} trainable ({kind})"
    decay, free = "", trainable_count(model, loop.undecayed)
    if loop.plan.weight_decay and free:
        decay = f"no weight decay for norms, biases and embeddings ({compact(free)} parameters;"
        decay += f" set {named(decay_all=True)} to change)\n"
    targets = f"{training_data.learned:,} target tokens for training"
    if loop.method.is_on_policy:
        targets = f"{training_data.learned:,} {loop.method.unit} for training"
    if whole.draft_heads:
        decay += f"{draft_heads_in_words(loop)}\n"
    if loop.plan.trained_tokens:
        seen = account_of(loop.tokenizer, loop.plan.trained_tokens, training_data)
        targets = f"{seen}; {targets}"
    if loop.method.is_on_policy:
        decay += f"{loop.method.account(loop)}\n"
    return (
        f"{decay}{model.config.model_type}, {compact(count)} parameters, {trained};"
        f" {targets}, {training_data.held_out_tokens:,} for evaluation; output:"
        f" {loop.run.folder}" + f"; {model.origin}" * bool(model.origin)
    )


def draft_heads_in_words(loop: Loop) -> str:
    """Return what the run does with the model's draft heads."""
    if weight := loop.plan.mtp_weight:
        return f"draft heads (multi-token prediction) are trained with weight {weight:g}"
    text = "draft heads (multi-token prediction) are saved as they are"
    if loop.model.adapter is not None:
        return text
    cure = f"{named(mtp_weight=0.1)} trains them"
    return f"{text}: as the model changes, fewer of their drafts fit; {cure}"


def compact(number: int) -> str:
    """Return a number with three digits and a unit: 1.44M for 1,437,184."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 0.9995 * size:  # rounds to 1.00 of this unit
            digits = 2 - sum(number >= limit * size for limit in (9.995, 99.95))
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def trainable_count(model: models.Transformer, names: Collection[str] | None = None) -> int:
    """Return the number of trainable parameters (of ``names`` only), over all ranks."""
    trained, division = model.trainable, model.division
    trained = {n: a for n, a in trained.items() if names is None or n in names}
    if division is None:
        return sum(array.size for array in trained.values())
    count = sum(math.prod(division.whole_shape(n, a.shape)) for n, a in trained.items())
    if division.stages is None:
        return count
    return int(division.stages.comm.all_reduce(np.array([count]))[0])


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
    """Yield the text for training a tokenizer, and report the progress."""
    yield from (part for _, part in reading(text.blocks(), text.size, "training a tokenizer"))
