"""Causes of a difference, and their cures: tables of small checks, the first that fits is named.

A check gets the ``Fault`` of a stage, and returns (cause, cure), or None if it does not fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ..configs.config import Config, Rope
from ..configs.names import HEAD, TABLE, TABLE_OF_LAYERS
from ..gguf.as_read import KEY
from ..gguf.finding import halves
from ..layers.block import rope_rows
from .rounding import Rounding, rounding_of, rows_of, worst_row
from .sides import Side

EQUAL = 1e-5  # relative: a file has numbers in float32
SHOWN = 60  # characters of a value
ALIKE = 0.2  # cosine of weights of two checkpoints of one model; of unrelated ones it is near 0
CLOSE = 2.5  # as for rows: errors of up to h have sqrt(3) times the expected norm
AGAIN = "export the model again"
FETCH = "export the model again, or convert it with a newer converter"
NO_CURE = "none: a file cannot change it; use a reader that computes it as training did"
Cause = tuple[str, str]


class Suspect(NamedTuple):
    """A parameter that differs by more than its type rounds, in its worst row."""

    name: str
    difference: float
    bound: float
    row: int


@dataclass(frozen=True)
class Fault:
    """A stage with another result, and what is known there about both sides."""

    stage: str
    trained: Side
    own: Side
    prompt: int | None = None
    token: int | None = None
    difference: float = 0.0
    bound: float = 0.0
    layer: int = -1
    texts: tuple[str, str] = ("", "")
    ids: tuple[Sequence[int], Sequence[int]] = ((), ())
    error: str = ""
    suspects: Sequence[Suspect] = ()
    # "trained": parameters by name; "stored": those of the file under the same names
    weights: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)

    def rounding(self, name: str, array: Array) -> Rounding:
        """Return the rounding of a parameter."""
        return rounding_of(array, self.own.type_of(name))

    def fits(self, name: str, expected: Array, stored: Array) -> bool:
        """Return whether rounding explains the difference of two arrays."""
        if expected.shape != stored.shape:
            return False
        off, bound, _ = worst_row(expected, stored, self.own.type_of(name))
        return off <= CLOSE * bound

    def word(self, number: int) -> str:
        """Return a token with its text."""
        texts = (side.backend.id_to_token(number) for side in (self.trained, self.own))
        return f"{number} ({next(filter(None, texts), None)!r})"


def explained(fault: Fault) -> Cause:
    """Return the cause of a fault in a sentence, and its cure."""
    kind = fault.stage.split()[0]
    for check in TABLE_OF_CAUSES[kind]:
        if (cause := check(fault)) is not None:
            return cause
    settings = ", ".join(differing(fault.trained.config, fault.own.config))
    words = f"settings differ: {settings}" if settings else "none of the known causes fits"
    return words, f"{AGAIN}; if the difference remains, report it with this output"


# ---- template -----------------------------------------------------------------------------------
def _of_modelfile(fault: Fault) -> Cause | None:
    if fault.own.modelfile is None or fault.own.file is None or fault.error:
        return None
    begin, (text, other) = fault.own.file.chat.tokens["bos_token"], fault.texts
    cure = "write it with export --modelfile, or change TEMPLATE so that it writes this text"
    if begin and fault.own.file.added[0] and other.removeprefix(begin) == text != other:
        cause = f"the file adds the begin token {begin!r}, and TEMPLATE has it already: two BOS"
        return cause, f"remove {begin!r} from TEMPLATE"
    if fault.own.modelfile.system and fault.own.modelfile.system in other:
        return "SYSTEM of the Modelfile adds a message to each prompt", "remove SYSTEM"
    return "TEMPLATE of the Modelfile writes another text than the chat template", cure


def _no_template(fault: Fault) -> Cause | None:
    if fault.own.chat.stored:
        return None
    reader = "llama.cpp uses ChatML" if fault.own.file else "readers use a template of their own"
    cause = f"the file has no chat template, so {reader}"
    return cause, "write it into the file: export from a folder that has chat_template.jinja"


def _broken_template(fault: Fault) -> Cause | None:
    if not fault.error:
        return None
    return f"the file's template cannot be rendered: {fault.error}", "use the model's own template"


def _other_template(fault: Fault) -> Cause | None:
    if fault.own.chat.source == fault.trained.chat.source:
        return None
    cause = "the chat template of the file is not the one of the trained model"
    return cause, "export from the folder of the run, or pass its folder with --tokenizer"


def _other_names(fault: Fault) -> Cause | None:
    tokens, own = fault.trained.chat.tokens, fault.own.chat.tokens
    names = [n for n, text in tokens.items() if own.get(n) != text and n in fault.own.chat.source]
    if not names:
        return None
    cause = f"the template reads {names[0]}, which is {own.get(names[0])!r} for the file's reader"
    return cause + f" and {tokens[names[0]]!r} in training", "write its text into the template"


# ---- tokens -------------------------------------------------------------------------------------
def _two_begins(fault: Fault) -> Cause | None:
    first, second = (list(each) for each in fault.ids)
    if second[1:] != first or not second:
        return None
    word = fault.word(second[0])
    begins = {fault.own.chat.tokens.get("bos_token"), fault.trained.chat.tokens.get("bos_token")}
    begins.add(fault.trained.backend.id_to_token(second[0]))
    if first and fault.trained.backend.id_to_token(first[0]) in begins:
        cause = f"the file adds the begin token {word}, and the template has"
        return f"{cause} {fault.word(first[0])} already: two BOS", _cure_of_begin(fault, add=False)
    return f"the file adds the token {word} before a text", _cure_of_begin(fault, add=False)


def _no_begin(fault: Fault) -> Cause | None:
    first, second = (list(each) for each in fault.ids)
    if first[1:] != second or not first:
        return None
    cause = f"the file does not add the begin token {fault.word(first[0])}"
    return cause, _cure_of_begin(fault, add=True)


def _cure_of_begin(fault: Fault, *, add: bool) -> str:
    """Return how to change whether a reader adds the begin token."""
    if fault.own.file:
        return f"{AGAIN}, or set {KEY}add_bos_token to {str(add).lower()} in the file"
    return "copy tokenizer.json from the trained model's folder"


def _end_added(fault: Fault) -> Cause | None:
    first, second = (list(each) for each in fault.ids)
    if second[:-1] != first or not second:
        return None
    cause = f"the file adds the token {fault.word(second[-1])} after a text"
    return cause, f"{AGAIN}, or set {KEY}add_eos_token to false in the file"


def _other_vocabulary(fault: Fault) -> Cause | None:
    mine, theirs = fault.trained.backend, fault.own.backend
    numbers = {number for ids in fault.ids for number in ids}
    for number in sorted(numbers):
        first, second = mine.id_to_token(number), theirs.id_to_token(number)
        if first != second:
            cause = f"token {number} is {second!r} in the file and {first!r} in training"
            return f"{cause}: another tokenizer", "export with the tokenizer of the trained model"
    return None


def _added_token(fault: Fault) -> Cause | None:
    mine, theirs = (
        {n: token.content for n, token in side.backend.get_added_tokens_decoder().items()}
        for side in (fault.trained, fault.own)
    )
    text = fault.texts[0]
    for number, content in mine.items():
        if content in text and theirs.get(number) != content:
            cause = f"token {number} ({content!r}) is not an added token of the file, so its text"
            return f"{cause} is split", f"{AGAIN}, so that its token_type is control"
    for number, content in theirs.items():
        if content in text and mine.get(number) != content:
            cause = f"token {number} ({content!r}) is an added token of the file alone"
            return cause, "export with the tokenizer of the trained model"
    return None


def _normalized(fault: Fault) -> Cause | None:
    first, second = (
        side.backend.normalizer.normalize_str(fault.texts[0])
        if side.backend.normalizer is not None else fault.texts[0]
        for side in (fault.trained, fault.own)
    )  # fmt: skip
    if first == second:
        return None
    if first.lstrip("\u2581") == second.lstrip("\u2581"):
        cause = "the file puts a space before a text (add_space_prefix), or training did"
        return cause, f"{AGAIN} with the tokenizer of the trained model"
    return "the file's reader does not normalise texts to NFC", "pass it texts in NFC"


def _words(fault: Fault) -> Cause | None:
    first, second = (
        [] if side.backend.pre_tokenizer is None
        else [word for word, _ in side.backend.pre_tokenizer.pre_tokenize_str(fault.texts[0])]
        for side in (fault.trained, fault.own)
    )  # fmt: skip
    if first == second:
        return None
    rule = f" {fault.own.file.values.get(f'{KEY}pre')!r} ({KEY}pre)" if fault.own.file else ""
    cause = f"the file splits texts into words by another rule{rule}"
    return cause, f"{AGAIN} with the tokenizer of the trained model"


def _merges(fault: Fault) -> Cause | None:
    cause = "the file merges other pairs of tokens (merges or scores)"
    return cause, f"{AGAIN} with the tokenizer of the trained model"


# ---- weights ------------------------------------------------------------------------------------
def _other_shape(fault: Fault) -> Cause | None:
    sizes = [
        f"{name} {getattr(fault.own.config, name)} in the file and {value} in training"
        for name in ("hidden", "layers", "heads", "kv_heads", "vocab")
        if (value := getattr(fault.trained.config, name)) != getattr(fault.own.config, name)
    ]
    first, second = fault.trained.config, fault.own.config
    if (first.hidden, first.layers) != (second.hidden, second.layers):
        return f"the file is of another model: {', '.join(sizes)}", "name the file of this model"
    return None


def _arrays(fault: Fault) -> Iterator[tuple[Suspect, Array, Array]]:
    """Yield each suspect with its array in training and in the file."""
    for each in fault.suspects:
        yield each, fault.weights["trained"][each.name], fault.weights["stored"][each.name]


def _not_finite(fault: Fault) -> Cause | None:
    for each, _, stored in _arrays(fault):
        if not np.isfinite(stored).all():
            tensor = fault.own.tensor(each.name)
            return f"{tensor} has numbers that are not finite", FETCH
        if not stored.any():
            return f"{fault.own.tensor(each.name)} contains zeros only", FETCH
    return None


def _not_merged(fault: Fault) -> Cause | None:
    plain = fault.trained.plain
    adapter = fault.trained.adapter
    if plain is None or adapter is None or not fault.suspects:
        return None
    shares = []
    for each, trained, stored in _arrays(fault):
        if not adapter.adds_to(each.name):
            return None
        base = plain(each.name)
        if base.shape != stored.shape:
            return None
        update, own = trained - base, stored - base
        if not fault.fits(each.name, np.float32(_share(update, own)) * update + base, stored):
            return None
        shares.append(_share(update, own))
    share = float(np.median(shares))
    if abs(share) < 0.05:
        return "the file has the base without the adapter", "export the folder of the run"
    cause = f"the adapter is merged {share:.3g} times: its scale (alpha / rank) is another one"
    return cause, "merge it once, with the alpha and rank of its adapter_config.json"


def _share(update: Array, own: Array) -> float:
    """Return the factor s with the least |own - s update|."""
    return float((own * update).sum() / max(float((update * update).sum()), 1e-30))


def _other_base(fault: Fault) -> Cause | None:
    """Return the cause if all matrices resemble the trained ones, and none has their numbers."""
    matrices = {n for n, array in fault.weights.get("trained", {}).items() if array.ndim > 1}
    arrays = [each for each in _arrays(fault) if each[1].ndim > 1]
    if not matrices or matrices != {each.name for each, *_ in arrays}:
        return None
    if _few_rows(fault, *arrays[0]) or min(_cosine(a, b) for _, a, b in arrays) < ALIKE:
        return None
    what = "the file is"
    if fault.own.adapter is not None:
        what = "the base of the adapter is"
    elif fault.trained.adapter is not None:
        what = "the base that was merged is"
    cause = f"{what} another checkpoint than the one that was trained"
    return cause, "name the right base with --base, or export the folder of the run again"


def _cosine(a: Array, b: Array) -> float:
    """Return the cosine of two arrays."""
    size = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float((a * b).sum()) / max(size, 1e-30)


def _few_rows(fault: Fault, suspect: Suspect, trained: Array, stored: Array) -> bool:
    """Return whether fewer than half of the rows differ."""
    off = np.linalg.norm(rows_of(stored - trained), axis=1)
    bound = fault.rounding(suspect.name, stored).norms()
    return bool(np.mean(off > CLOSE * bound) < 0.5)


def _rows(fault: Fault) -> Cause | None:
    """Return the cause if few rows of an embedding table or of the head differ."""
    for each, trained, stored in _arrays(fault):
        if each.name in (TABLE, TABLE_OF_LAYERS, HEAD) and _few_rows(fault, each, trained, stored):
            what = "other numbers" if stored[each.row].any() else "zeros"
            word, tensor = fault.word(each.row), fault.own.tensor(each.name)
            cause = f"the row of token {word} in {tensor} has {what}"
            return cause, f"{AGAIN}: the rows of added tokens were trained, too"
    return None


def _permuted(fault: Fault) -> Cause | None:
    config = fault.trained.config
    for each, trained, stored in _arrays(fault):
        module = each.name.split(".")[-2]
        if module not in ("q_proj", "k_proj") or config.latent is not None:
            continue
        heads = config.heads if module == "q_proj" else config.kv_heads
        for order in _orders(config, heads, len(trained)):
            if fault.fits(each.name, trained[order], stored):
                tensor = fault.own.tensor(each.name)
                cause = f"{tensor} is permuted: its rotary pairs are in another order"
                return cause, "convert again: rows of q and k are reordered for this architecture"
    return None


def _orders(config: Config, heads: int, rows: int) -> Iterator[Array]:
    """Yield orders of rows that a converter applies: pairs to halves, and the inverse."""
    rope = next(iter(config.ropes.values()), None)
    if rope is None or rows % heads or rope.dim % 2:
        return
    order = halves(heads, rope.dim, {"weight": np.arange(rows)})
    yield order
    yield np.argsort(order)


def _swapped(fault: Fault) -> Cause | None:
    """Return the cause if a tensor is another one of its block, such as gate and up."""
    trained = fault.weights.get("trained", {})
    for each, _, stored in _arrays(fault):
        for other, array in trained.items():
            if other != each.name and fault.fits(each.name, array, stored):
                cause = f"{fault.own.tensor(each.name)} has the weights of {other}"
                return f"{cause}: they are swapped", FETCH
        halved = np.split(stored, 2, axis=-2) if "gate_up" in each.name and stored.ndim > 1 else []
        if halved and fault.fits(
            each.name, trained[each.name], np.concatenate(halved[::-1], axis=-2)
        ):
            return f"gate and up of {each.name} are swapped", FETCH
    return None


def _experts(fault: Fault) -> Cause | None:
    for each, trained, stored in _arrays(fault):
        if trained.ndim != 3:
            continue
        tensor = fault.own.tensor(each.name)
        if trained.shape[1] == trained.shape[2] and fault.fits(
            each.name, trained.swapaxes(1, 2), stored
        ):
            return f"the experts of {tensor} are transposed", FETCH
        parts = [np.split(stack, 2, axis=1) for stack in (trained, stored)]
        if "gate_up" in each.name and trained.shape[1] == 2 * trained.shape[2] and all(
            fault.fits(each.name, a.swapaxes(1, 2), b) for a, b in zip(*parts, strict=True)
        ):  # fmt: skip
            return f"the experts of {tensor} are transposed", FETCH
        nearest = [
            int(np.argmin([np.linalg.norm(own - each_) for each_ in trained])) for own in stored
        ]
        if nearest != [*range(len(nearest))] and fault.fits(each.name, trained[nearest], stored):
            return f"the experts of {tensor} are in another order ({nearest[:8]})", FETCH
    return None


def _other_layer(fault: Fault) -> Cause | None:
    """Return the cause if a tensor has the weights of another block."""
    if fault.layer < 0 or not fault.suspects:
        return None
    smallest = min(_arrays(fault), key=lambda each: each[1].size)
    each, _, stored = smallest
    prefix, _, inner = each.name.partition(f".layers.{fault.layer}.")
    for layer in range(fault.trained.config.layers):
        name = f"{prefix}.layers.{layer}.{inner}"
        if layer == fault.layer or name not in fault.trained.config.shapes():
            continue
        if fault.fits(each.name, fault.trained.read(name), stored):
            cause = f"{fault.own.tensor(each.name)} has the weights of block {layer}"
            return cause, FETCH
    return None


def _offset(fault: Fault) -> Cause | None:
    for each, trained, stored in _arrays(fault):
        if trained.ndim == 1:
            for sign, word in ((1, "twice"), (-1, "not")):
                if fault.fits(each.name, trained + np.float32(sign), stored):
                    tensor = fault.own.tensor(each.name)
                    cause = f"1 is {word} added to the norm {tensor}"
                    return cause, "convert again: this family stores norms plus 1"
    return None


def _scaled(fault: Fault) -> Cause | None:
    for each, trained, stored in _arrays(fault):
        factor = np.float32(_share(trained, stored))
        if np.isfinite(factor) and factor and fault.fits(each.name, trained * factor, stored):
            return f"{fault.own.tensor(each.name)} is multiplied by {factor:.4g}", FETCH
    return None


def _tensor(fault: Fault) -> Cause | None:
    if not fault.suspects:
        return None
    worst = max(fault.suspects, key=lambda each: each.difference)
    kind, others = fault.own.type_of(worst.name).lower(), len(fault.suspects) - 1
    cause = f"{fault.own.tensor(worst.name)} is not the trained weight: row {worst.row} is off by"
    cause += f" {worst.difference:.2g}, and {kind} rounds by at most {worst.bound:.2g}"
    cause += f"; so are {others} more tensors of this stage" * bool(others)
    return cause, FETCH


# ---- settings -----------------------------------------------------------------------------------
def _ropes(fault: Fault) -> Cause | None:
    config, own = fault.trained.config, fault.own.config
    if fault.layer < 0 or not config.attends(fault.layer) or not own.attends(fault.layer):
        return None
    first, second = (c.ropes.get(c.layer_types[fault.layer]) for c in (config, own))
    if first is None or second is None or _turns_alike(first, second, config.positions):
        return None
    scaling, other = (dict(each.scaling or {}) for each in (first, second))
    if other.get("truncate", True) != scaling.get("truncate", True):
        return "llama.cpp rounds yarn's columns, and this model does not", NO_CURE
    cure = f"{AGAIN}, so that its keys rope.* and tensors rope_* are those of config.json"
    return _words_of_ropes(first, second, config.positions), cure


def _words_of_ropes(first: Rope, second: Rope, length: int) -> str:
    """Return the difference of two settings of rotary positions in words."""
    scaling, other = (dict(each.scaling or {}) for each in (first, second))
    kind, other_kind = (str(each.get("rope_type", "default")) for each in (scaling, other))
    keys = [name for name in {**scaling, **other} if not _equal(scaling.get(name), other.get(name))]
    cause = "rotary positions differ"
    if first.dim != second.dim:
        cause = f"the file rotates {second.dim} elements of a head, not {first.dim}"
    elif abs(first.base / second.base - 1) > EQUAL:
        cause = f"the file has the rotary base {second.base:g}, not {first.base:g}"
    elif kind != other_kind == "default":
        short = scaling.get("original_max_position_embeddings")
        cause = f"rope factors ({kind}) are missing"
        cause += f": the file reads {short:,} tokens as {length:,}" if short else ""
    elif kind != other_kind:
        cause = f"the file scales rotary positions by {other_kind}, not {kind}"
    elif keys:
        values = (str(each.get(keys[0]))[:SHOWN] for each in (other, scaling))
        cause = f"{keys[0]} of rotary positions is {' and not '.join(values)}"
    return cause


def _turns_alike(first: Rope, second: Rope, positions: int) -> bool:
    """Return whether two settings give the same rotary tables, up to 1024 positions."""
    like, length = np.empty(0, np.float32), min(positions, 1024)
    if first.dim != second.dim:
        return False
    pairs = zip(*(rope_rows(each, like)(length) for each in (first, second)), strict=False)
    return all(np.allclose(a[:length], b[:length], rtol=0, atol=1e-3) for a, b in pairs)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two settings are equal, numbers to ``EQUAL``."""
    if isinstance(a, bool | str | None) or isinstance(b, bool | str | None):
        return bool(a == b)
    try:
        return bool(np.allclose(a, b, rtol=EQUAL, atol=0))
    except (TypeError, ValueError):
        return bool(a == b)


def _window(fault: Fault) -> Cause | None:
    if fault.layer < 0:
        return None
    first, second = (c.window_of(fault.layer) for c in (fault.trained.config, fault.own.config))
    if first == second:
        return None
    if second is None:
        cause = f"the reader has no window: block {fault.layer} attends to more than {first} tokens"
        return cause, f"keep texts below {first} tokens, or use a reader with windows"
    return f"block {fault.layer} has a window of {second} tokens, not {first}", AGAIN


def _setting(name: str, words: str, fault: Fault) -> Cause | None:
    """Return the cause that a field of the config differs."""
    first, second = (getattr(c, name) for c in (fault.trained.config, fault.own.config))
    if _equal(first, second):
        return None
    if second is None:
        return f"{words} is missing: it is {first} in training", AGAIN
    return f"{words} is {second} in the file and {first} in training", AGAIN


def _inner_epsilon(fault: Fault) -> Cause | None:
    first, second = fault.trained.config.inner_eps, fault.own.config.inner_eps
    if first == second:
        return None
    cause = f"norms inside latent attention or a delta rule use an epsilon of {second:g} in"
    return f"{cause} llama.cpp, and {first:g} in training", NO_CURE


def _experts_setting(fault: Fault) -> Cause | None:
    first, second = fault.trained.config.experts, fault.own.config.experts
    if first is None or second is None:
        return None
    names = ("k", "scale", "normalize", "scores", "groups", "top_groups", "limit", "alpha")
    for name in names:
        a, b = getattr(first, name), getattr(second, name)
        if not _equal(a, b):
            return f"experts: {name} is {b} in the file and {a} in training", AGAIN
    return None


def _head(fault: Fault) -> Cause | None:
    first, second = fault.trained.config.tied, fault.own.config.tied
    if second and not first:
        cause = "the file has no output.weight: its reader uses the embedding table as the head"
        return cause, f"{AGAIN}: the trained model has a head of its own"
    return None


def differing(trained: Config, own: Config) -> list[str]:
    """Return the settings that differ, as text."""
    return [
        f"{each.name} {str(b)[:SHOWN]}, not {str(a)[:SHOWN]}"
        for each in fields(Config)
        if each.name not in UNSEEN
        and not _equal(a := getattr(trained, each.name), b := getattr(own, each.name))
    ]


UNSEEN = {  # what no stage computes
    *("model_type", "initializer_range", "end_tokens", "pad_token", "body", "names", "fused"),
    *("positions", "layer_types", "wide", "wide_in_float16", "left_out", "inverse_scales"),
    *("draft", "draft_heads", "draft_tables", "draft_copies"),
}


# ---- answers and ends ---------------------------------------------------------------------------
def _no_end(fault: Fault) -> Cause | None:
    (first,), (second,) = fault.ids
    if first not in fault.trained.stops:
        return None
    cause = f"the answer ends with {fault.word(first)} in training, and goes on with"
    return f"{cause} {fault.word(second)}: answers do not end", f"{AGAIN}, or with more bits"


def _best_token(fault: Fault) -> Cause | None:
    first, second = fault.ids
    cause = f"the most likely token is {fault.word(second[0])}, not {fault.word(first[0])}"
    return cause, f"choose a type with more bits, or {AGAIN}"


def _stops(fault: Fault) -> Cause | None:
    missing, _ = fault.ids
    if not missing:
        return None
    cause = f"stop token {fault.word(missing[0])} is not in the file: answers do not end"
    key = f"{KEY}eot_token_id" if fault.own.file else "eos_token_id of generation_config.json"
    return cause, f"{AGAIN}, or set {key} to {missing[0]}"


def _stops_early(fault: Fault) -> Cause | None:
    _, early = fault.ids
    if not early:
        return None
    cause = f"the reader stops at token {fault.word(early[0])}, and training does not: answers are"
    return f"{cause} cut", "train with this token as the end of answers only, or use another reader"


def _context(fault: Fault) -> Cause | None:
    first, second = fault.trained.config.positions, fault.own.config.positions
    if second >= first:
        return None
    key = "context_length" if fault.own.file else "max_position_embeddings"
    cause = f"{key} is {second:,} in the file and {first:,} in training: longer texts are cut"
    return cause, f"{AGAIN}, or set the key"


def _settings(*pairs: tuple[str, str]) -> list[Callable[[Fault], Cause | None]]:
    """Return the checks of fields of the config."""
    return [partial(_setting, name, words) for name, words in pairs]


WEIGHTS = (
    *(_not_finite, _not_merged, _permuted, _swapped, _experts, _offset, _other_layer, _scaled),
    *(_other_base, _rows),
)
TABLE_OF_CAUSES: Mapping[str, Sequence[Callable[[Fault], Cause | None]]] = {
    "template": (_of_modelfile, _no_template, _broken_template, _other_names, _other_template),
    "tokens": (
        *(_two_begins, _no_begin, _end_added, _added_token, _other_vocabulary, _normalized),
        *(_words, _merges),
    ),
    "embedding": (
        *(_other_shape, *WEIGHTS, _tensor),
        *_settings(("embedding_scale", "the factor of the embedding")),
    ),
    "block": (
        *(*WEIGHTS, _tensor, _ropes, _window),
        *_settings(
            ("eps", "the epsilon of norms"),
            ("softcap", "the cap of scores (attn_logit_softcapping)"),
            ("clip", "the bound of queries, keys and values"),
            ("scale", "the factor of scores"),
            ("residual_scale", "the factor of residual sums"),
            ("activation", "the activation"),
        ),
        _experts_setting,
        _inner_epsilon,
        *_settings(
            ("rotated", "the list of layers that rotate"),
            ("layer_types", "the list of types of layers"),
        ),
    ),
    "logits": (
        *(_head, *WEIGHTS, _tensor),
        *_settings(
            ("logit_softcap", "the cap of logits (final_logit_softcapping)"),
            ("logit_scale", "the factor of logits"),
            ("eps", "the epsilon of norms"),
        ),
    ),
    "answer": (_no_end, _best_token),
    "end": (_stops, _stops_early, _context),
}
