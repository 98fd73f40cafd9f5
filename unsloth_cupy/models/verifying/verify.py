"""Why a file answers differently from the trained model: ``verify``.

Both sides compute the same prompts, stage by stage, with a block of weights of each in memory:

    template     text of a prompt
    tokens       its token ids
    embedding    rows of the embedding table
    block N      output of each block
    logits       of the next token
    answer       the most likely token after each prompt
    end          tokens at which the reader stops, and its context

A third pass moves the weights of the file by errors as large as its types round: see ``rounding``.
For the states x of a token, with y of the file and z of the third pass,

    difference = |y - x| / |x|                bound = MARGIN max |z - y| / |x|, over all tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.call import check_options
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import path_of
from ..adapters.probe import Unread
from ..configs.config import Experts
from ..configs.heads import CAUSAL, require_head
from ..configs.names import TABLE
from ..gguf.opening import gguf_in
from ..layers.block import block, embedded
from ..layers.head import logits_of
from ..layers.norms import join
from ..transformer import Transformer
from .causes import Fault, Suspect, differing, explained
from .llama_cpp import LlamaCpp, activations
from .modelfile import is_modelfile, read_modelfile
from .rounding import Rounding, rounding_of, worst_row
from .sides import Prompt, Side, file_side, folder_side

# The errors of a file have another direction than errors that are drawn.  For right files of all
# written families, tiny and random, a difference was up to 3.3 times the largest of the third pass.
MARGIN = 6.0
SETTINGS = 1e-5  # equal settings give equal bits; float32 rounds numbers of a file by 6e-8
ROW_MARGIN = 2.5  # |w' - w| <= h gives sqrt(3); the largest weight of a group may be cut off
MOST = 1 << 24  # logits of all tokens up to 64 MiB; beyond it, those after the prompts
FAR = 1 << 17  # rotary angles are compared up to this position
ANGLE = 0.02  # of cos and sin: float32 rounds angles of FAR radians by 0.008
PROMPTS = (  # words, digits, case, spaces and signs, on which tokenizers differ
    "Why is the sky blue?",
    "I'll compute 12345 + 3.14 = ?\n\n  def f(x):\n\treturn x  # \u00fcber, \u4f60\u597d",
)


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``; it prints as a few lines.

    Attributes
    ----------
    same : bool
        Whether all differences are within the rounding of the file's types.
    stage : str or None
        The first stage with another result: "template", "tokens", "embedding", "block N",
        "logits", "answer" or "end".  None if all are the same.
    prompt, token : int or None
        The first prompt, and token in it, whose result differs; None for an end.
    difference, bound : float
        Relative difference at this stage, and the difference that rounding explains; of logits if
        all stages are the same.  0 and 0 for texts and tokens.
    cause, cure : str or None
        A sentence each; None if all stages are the same.
    exact : bool
        Whether all weights and logits have equal bits.
    compared : str
        The numbers of prompts and tokens, and the types of the file.
    """

    same: bool
    stage: str | None
    prompt: int | None
    token: int | None
    difference: float
    bound: float
    cause: str | None
    cure: str | None
    exact: bool = False
    compared: str = ""

    def __str__(self) -> str:
        if self.same:
            result = "equal bits" if self.exact else f"difference {self.difference:.2g}"
            line = f"same: logits have {result}, and rounding explains {self.bound:.2g}"
            return f"{line} ({self.compared})"
        place = [f"prompt {self.prompt}"] * (self.prompt is not None)
        place += [f"token {self.token}"] * (self.token is not None)
        where = f", {' '.join(place)}" if place else ""
        amount = f": {self.difference:.2g}, and rounding explains {self.bound:.2g}"
        amount *= bool(self.difference)
        lines = [f"not the same: first at {self.stage}{where}{amount} ({self.compared})"]
        return "\n".join([*lines, f"cause: {self.cause}", f"cure: {self.cure}"])


@check_options
def verify(
    file: str | PathLike[str],
    against: str | PathLike[str],
    *,
    prompts: Sequence[Any] | None = None,
    base: str | PathLike[str] | None = None,
) -> Verification:
    """Compare a file, as its reader computes it, with the model that was trained.

    Stages are compared in order, from the text of a prompt to the end of an answer; the first one
    with another result is returned with its cause.  Weights are read block by block.

    Parameters
    ----------
    file : path
        A GGUF file, which is read as llama.cpp reads it; a Modelfile, as Ollama reads it; or a
        folder as transformers and peft read it: of a model, or of an adapter.
    against : path
        The folder of a run, a model or an adapter: the model as trained.
    prompts : sequence of str or of lists of messages, optional
        Messages are formatted by the chat template of each side, and so are texts if the trained
        model has a template.  None: two built-in texts.
    base : path or name, optional
        The base model of the trained adapter, in place of the one that it names.

    Returns
    -------
    result : Verification

    Raises
    ------
    ConfigError
        A file or folder cannot be read, or a prompt is invalid.
    """
    return verified(file, against, prompts, base)


def verified(
    file: Any, against: Any, prompts: Any = None, base: Any = None, *, beside: bool = False
) -> Verification:
    """Return ``verify``'s result; ``beside``: llama.cpp itself computes the prompts, too."""
    path = path_of("verify", file)
    trained = folder_side("verify", path_of("verify(against=)", against), base)
    modelfile = read_modelfile(path) if is_modelfile(path) else None
    opened = gguf_in(path) if modelfile is None else modelfile.source
    if beside and (opened is None or modelfile is not None):
        raise ConfigError(f"verify: llama.cpp reads GGUF files; {path} is none, so leave it out")
    own = folder_side("verify", path) if opened is None else file_side(opened, modelfile)
    return compare(trained, own, PROMPTS if prompts is None else prompts, beside=beside)


def compare(
    trained: Side, own: Side, prompts: Sequence[Prompt], *, beside: bool = False
) -> Verification:
    """Return the comparison of two sides."""
    for side in (trained, own):
        require_head("verify", side.config, CAUSAL)
    _check(prompts)
    texts = _Texts(trained, own, prompts)
    fault = texts.fault()
    compared = f"{len(prompts)} prompts"
    if fault is None:
        compared += f", {sum(map(len, texts.ids)):,} tokens"
        numbers = _Numbers(trained, own, texts.ids)
        fault = numbers.fault() or _end(trained, own)
        compared += f"; {numbers.types()}"
        if fault is None:
            last = numbers.last
            facts: Any = (last.difference, last.bound, None, None, numbers.exact, compared)
            result = Verification(True, None, None, None, *facts)
            return _beside(result, texts, numbers) if beside else result
    cause, cure = explained(fault)
    place = fault.stage, fault.prompt, fault.token, fault.difference, fault.bound
    return Verification(False, *place, cause, cure, False, compared)


def _beside(result: Verification, texts: "_Texts", numbers: "_Numbers") -> Verification:
    """Return the comparison with llama.cpp itself: texts, tokens, and the next token.

    The bound of log-probabilities is 2 MARGIN times the noise of the third pass, and the largest
    logit times the share that llama.cpp's rounding of activations explains.
    """
    file, vocab = Path(texts.own.where), texts.own.config.vocab
    program = LlamaCpp(file, max(map(len, texts.ids)))
    compared = f"{result.compared}; llama.cpp of xllamacpp {program.version}"
    share, worst = activations([*numbers.counts]), (0.0, 1.0)
    for number, (prompt, ids) in enumerate(zip(texts.prompts, texts.ids, strict=True)):
        as_chat, stage, token = texts.trained.chat.stored, "", 0
        text, difference, bound = texts.own.text(prompt, as_chat), 0.0, 0.0
        if as_chat and program.text(_messages(prompt)) != text:
            stage = "template"
        elif (other := program.tokens(text)) != ids:
            both = zip([*ids, None], [*other, None], strict=False)
            stage, token = "tokens", next(n for n, (a, b) in enumerate(both) if a != b)
        else:
            x, y, z = (_log_softmax(each[number]) for each in numbers.ends)
            noise = float(np.sqrt(np.mean((z - y) ** 2)))
            bound = 2 * MARGIN * noise + share * float(np.abs(numbers.ends[0][number]).max())
            off = np.abs(program.log_probs(ids, vocab)[: len(x)] - x)
            difference, token = float(np.nan_to_num(off, nan=np.inf).max()), len(ids) - 1
            worst = max(worst, (difference, bound), key=lambda pair: pair[0] / pair[1])
            stage = "logits" if difference > bound else ""
        if stage:
            cause = "llama.cpp itself computes something else than its rules as known here"
            cure = "report this with the file; use another version of llama.cpp"
            place = (stage, number, token, difference, bound)
            return Verification(False, *place, cause, cure, False, compared)
    return replace(result, difference=worst[0], bound=worst[1], compared=compared)


def _messages(prompt: Prompt) -> Sequence[Any]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _log_softmax(logits: Array) -> Array:
    """Return the log-probabilities of logits."""
    result: Array = logits - np.logaddexp.reduce(logits)
    return result


def _check(prompts: Sequence[Any]) -> None:
    """Raise a ConfigError unless prompts are texts or lists of messages."""
    for number, prompt in enumerate(prompts):
        messages = not isinstance(prompt, str) and isinstance(prompt, Sequence) and len(prompt)
        if not (isinstance(prompt, str) and prompt) and not (
            messages and all(isinstance(each, Mapping) and "role" in each for each in prompt)
        ):
            problem = f"prompt {number} is {str(prompt)[:40]!r}"
            raise ConfigError(f"verify: {problem}; pass a text, or a list of messages with a role")
    if not prompts:
        raise ConfigError("verify(prompts=[]): pass at least one prompt")


# ---- texts and tokens ---------------------------------------------------------------------------
class _Texts:
    """The prompts as texts and tokens of both sides."""

    def __init__(self, trained: Side, own: Side, prompts: Sequence[Prompt]) -> None:
        self.trained, self.own, self.prompts = trained, own, prompts
        self.ids: list[list[int]] = []

    def fault(self) -> Fault | None:
        """Return the first text or token that differs, and set ``ids``."""
        trained, own, as_chat = self.trained, self.own, self.trained.chat.stored
        pairs = []
        for number, prompt in enumerate(self.prompts):
            text = trained.text(prompt, as_chat)
            fault = Fault("template", trained, own, number, texts=(text, ""))
            try:
                other = own.text(prompt, as_chat)
            except ConfigError as error:
                return replace(fault, token=0, error=str(error))
            pairs.append((text, other))
            if (plain := own.taken_off(text, as_chat)) != other:
                same = next(n for n in range(len(plain) + 1) if plain[: n + 1] != other[: n + 1])
                token = len(trained.tokens(plain[:same], True))
                return replace(fault, token=token, texts=(plain, other))
        for number, (text, other) in enumerate(pairs):
            first, second = trained.tokens(text, as_chat), own.tokens(other, as_chat)
            if first != second:
                both = enumerate(zip([*first, None], [*second, None], strict=False))
                token = next(n for n, (a, b) in both if a != b)
                place: Any = {"texts": (text, other), "ids": (first, second)}
                return Fault("tokens", trained, own, number, token, **place)
            vocab, positions = min(trained.config.vocab, own.config.vocab), trained.config.positions
            if not first or max(first) >= vocab or len(first) > positions:
                problem = f"prompt {number} has {len(first)} tokens"
                problem += f", at most token {max(first)}" if first else ""
                limits = f"the model has {vocab} tokens and {positions} positions"
                raise ConfigError(f"verify: {problem}, and {limits}; pass another prompt")
            self.ids.append(first)
        return None


# ---- numbers ------------------------------------------------------------------------------------
class _Pass:
    """A pass of packed tokens through the blocks of a model, one block at a time."""

    def __init__(self, side: Side, tokens: Array, offsets: Array) -> None:
        self.config, self.tokens = side.config, tokens
        parameters: dict[str, Any] = dict.fromkeys(side.config.shapes(), Unread())
        parameters[TABLE] = np.empty((0, side.config.hidden), FLOAT32)
        self.model = Transformer(side.config, parameters, side.texts)
        self.call = self.model.call(parameters, tokens[None], offsets=offsets, routers=[])
        self.routed: list[Array] = []  # experts of each token, by layers with experts
        self.branch: Any = None
        self.stream: Any = None

    def embed(self, rows: Array, places: Array) -> Array:
        """Set the states to rows of the embedding table, and return the states."""
        self.branch = embedded(self.config, {TABLE: rows}, places[None])
        return self.states()

    def run(
        self, layer: int, weights: Mapping[str, Array], routed: Sequence[Array] | None = None
    ) -> Array:
        """Run a block, and return the states after it; ``routed`` are the experts of its tokens."""
        routers = list[Any]()
        routes = np.stack(routed, axis=2) if routed else None
        experts = self.call.experts._replace(routers=routers, routes=routes)
        call = self.call._replace(parameters=weights, experts=experts)
        with np.errstate(all="ignore"):  # states that are not finite are compared, too
            self.branch, self.stream = block(call, layer, self.branch, self.stream)
        self.routed += [np.asarray(each.experts) for each in routers]
        return self.states()

    def states(self) -> Array:
        """Return the residual stream, (tokens, hidden)."""
        whole = self.branch if self.stream is None else self.branch + self.stream
        return np.asarray(whole, np.float64).reshape(len(self.tokens), -1)

    def logits(self, outer: Mapping[str, Array], rows: Array) -> Array:
        """Return the logits after some tokens."""
        call, last = self.call._replace(parameters=outer), self.config.norms.last
        with np.errstate(all="ignore"):
            x = join(call, "model.", last, self.branch, self.stream)[0]
            logits = logits_of(self.config, outer, np.ascontiguousarray(x[:, rows]))
        return np.asarray(logits[0], np.float64)


class _Amount(NamedTuple):
    """A difference and its bound; ``row`` is the first token above the bound, or None."""

    difference: float
    bound: float
    row: int | None


def _amount(before: Array, after: Array, shaken: Array) -> _Amount:
    """Return the difference of the first row above its bound; the largest if all are below."""
    sizes = np.maximum(np.linalg.norm(before, axis=1), 1e-30)
    with np.errstate(all="ignore"):
        off = np.nan_to_num(np.linalg.norm(after - before, axis=1) / sizes, nan=np.inf)
        own = np.nan_to_num(np.linalg.norm(shaken - after, axis=1) / sizes, nan=0.0, posinf=0.0)
    bounds = np.full(len(own), MARGIN * own.max())
    beyond = np.flatnonzero(off > bounds)
    row = int(beyond[0] if len(beyond) else np.argmax(off))
    return _Amount(float(off[row]), float(bounds[row]), row if len(beyond) else None)


def _routes_alike(first: Experts | None, second: Experts | None) -> bool:
    """Return whether both sides can use the same experts for a token.

    Then both use the same experts: a rounded router may choose others, which is no fault.
    """
    names = ("count", "k", "scores", "groups", "top_groups", "corrected", "sparse")
    pairs = [(getattr(first, name, None), getattr(second, name, None)) for name in names]
    return first is not None and second is not None and all(a == b for a, b in pairs)


class _Numbers:
    """The states and logits of both sides, and of the file with weights moved by rounding."""

    def __init__(self, trained: Side, own: Side, ids: Sequence[Sequence[int]]) -> None:
        self.trained, self.own = trained, own
        self.starts = np.cumsum([0, *map(len, ids)])
        self.tokens = np.concatenate([np.asarray(row, np.int64) for row in ids])
        self.readers = own.as_trained(trained.config)
        self.same_routers = _routes_alike(trained.config.experts, own.config.experts)
        self.settings_differ = bool(differing(trained.config, own.config))
        self.exact, self.last = True, _Amount(0.0, 0.0, None)
        self.counts: dict[str, int] = {}
        self.ends: list[Array] = []  # logits after each prompt, of the three passes

    def types(self) -> str:
        """Return the number of parameters of each type, as text."""
        return ", ".join(f"{number} {kind.lower()}" for kind, number in self.counts.items())

    def fault(self) -> Fault | None:
        """Return the first stage whose numbers differ by more than rounding."""
        return next(filter(None, self._stages()), None)

    def _stages(self) -> Iterator[Fault | None]:
        own, config = self.own.config, self.trained.config
        if (own.hidden, own.layers) != (config.hidden, config.layers):
            yield Fault("embedding", self.trained, self.own, 0, 0, 1.0)
        sides = (self.trained, self.own, self.own)
        self.passes = [_Pass(side, self.tokens, self.starts) for side in sides]
        # the trained settings with the weights of the file
        self.trained_settings = _Pass(self.trained, self.tokens, self.starts)
        yield self._embedding()
        for layer in range(config.layers):
            yield self._angles(layer)
            yield self._block(layer)
        yield self._logits()

    def _place(self, row: int) -> tuple[int, int]:
        """Return the prompt of a packed token, and the token's place in it."""
        prompt = int(np.searchsorted(self.starts, row, side="right")) - 1
        return prompt, int(row - self.starts[prompt])

    def _read(self, names: Sequence[str], others: Sequence[str]) -> "_Weights":
        """Return parameters of both sides, and those that differ by more than rounding."""
        trained = {name: self.trained.read(name) for name in names}
        own = {name: self.own.read(name) for name in others}
        shaken, stored, suspects = dict[str, Array](), dict[str, Array](), list[Suspect]()
        roundings = dict[str, Rounding]()
        for name, array in own.items():
            kind = self.own.type_of(name)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            roundings[name] = rounding_of(array, kind)
            shaken[name] = roundings[name].moved(name, array)
        for name, expected in trained.items():
            if name not in self.readers:
                continue
            reader = self.readers[name]
            if reader is None:
                stored[name] = own[name] if name in own else self.own.read(name)
            else:
                stored[name] = reader()
            self.exact &= np.array_equal(stored[name], expected)
            same = stored[name] is own.get(name)
            rounding = (
                roundings[name] if same else rounding_of(stored[name], self.own.type_of(name))
            )
            difference, bound, row = worst_row(expected, stored[name], rounding)
            if not difference <= ROW_MARGIN * bound:
                suspects.append(Suspect(name, difference, ROW_MARGIN * bound, row))
        return _Weights(trained, own, shaken, stored, suspects)

    def _faulty(self, stage: str, amount: _Amount, weights: "_Weights", layer: int) -> Fault | None:
        """Return the fault of a stage, or None."""
        if amount.row is None and not weights.suspects:
            return None
        difference, bound, row = amount
        if row is None:  # prompts do not show the difference
            worst = max(weights.suspects, key=lambda each: each.difference)
            difference, bound = worst.difference, worst.bound
        prompt, token = (None, None) if row is None else self._place(row)
        facts = {"trained": weights.trained, "stored": weights.stored}
        return Fault(
            stage, self.trained, self.own, prompt, token, difference, bound, layer,
            suspects=weights.suspects, weights=facts,
        )  # fmt: skip

    def _embedding(self) -> Fault | None:
        chosen, places = np.unique(self.tokens, return_inverse=True)
        weights = self._read([TABLE], [TABLE])
        tables = (each[TABLE][chosen] for each in weights.passes)
        states = [
            each.embed(table, places) for each, table in zip(self.passes, tables, strict=True)
        ]
        if not np.isfinite(states[0]).all():
            raise ConfigError(f"verify: the embeddings of {self.trained.where} are not finite")
        return self._faulty("embedding", _amount(*states), weights, -1)

    def _block(self, layer: int) -> Fault | None:
        prefix = f"model.layers.{layer}."
        names, others = (
            [name for name in side.config.shapes() if name.startswith(prefix)]
            for side in (self.trained, self.own)
        )
        weights = self._read(names, others)
        first, *others_of = self.passes
        before = self.passes[1].branch, self.passes[1].stream
        states = [first.run(layer, weights.trained)]
        routed = first.routed if self.same_routers else None
        for each, own in zip(others_of, weights.passes[1:], strict=True):
            states.append(each.run(layer, own, routed))
        if not np.isfinite(states[0]).all():
            problem = f"the states of {self.trained.where} after block {layer} are not finite"
            raise ConfigError(f"verify: {problem}; verify another checkpoint")
        stage = f"block {layer}"
        fault = self._faulty(stage, _amount(*states), weights, layer)
        if fault is not None or not self._same_weights(weights):
            return fault
        self.trained_settings.branch, self.trained_settings.stream = before
        other = self.trained_settings.run(layer, weights.own, routed)
        return self._other_settings(stage, other, states[1], layer)

    def _same_weights(self, weights: "_Weights") -> bool:
        """Return whether settings differ, and the trained settings fit the weights of the file."""
        names = weights.own.keys()
        same = names == weights.trained.keys() and names == weights.stored.keys()
        return self.settings_differ and same and all(self.readers[n] is None for n in names)

    def _other_settings(self, stage: str, other: Array, own: Array, layer: int) -> Fault | None:
        """Return a fault if the file's weights give something else with the trained settings.

        No rounding of types is in this difference.
        """
        sizes = np.maximum(np.linalg.norm(other, axis=1), 1e-30)
        off = np.nan_to_num(np.linalg.norm(own - other, axis=1) / sizes, nan=np.inf)
        beyond = np.flatnonzero(off > SETTINGS)
        if not len(beyond):
            return None
        row = int(beyond[0])
        if layer < 0 and len(off) == len(self.starts) - 1:  # rows after the prompts
            place = row, int(self.starts[row + 1] - self.starts[row] - 1)
        else:
            place = self._place(row)
        amounts = float(off[row]), SETTINGS
        return Fault(stage, self.trained, self.own, *place, *amounts, layer)

    def _angles(self, layer: int) -> Fault | None:
        """Return a fault if rotary angles differ at positions that prompts do not reach."""
        config, own = self.trained.config, self.own.config
        kind, other = config.layer_types[layer], own.layer_types[layer]
        if kind in config.layer_types[:layer] or not (config.attends(layer) and own.attends(layer)):
            return None
        if not (config.rotates(layer) and own.rotates(layer)):
            return None  # the block computes something else
        length = min(FAR, config.positions)
        first, second = (
            each.model.tables[name](length)[:2]
            for each, name in zip(self.passes, (kind, other), strict=False)
        )
        if first[0].shape[1:] != second[0].shape[1:]:
            return Fault(f"block {layer}", self.trained, self.own, None, None, 1.0, 0.0, layer)
        pairs = zip(first, second, strict=True)
        off = np.maximum(*(np.abs(a[:length] - b[:length]).max(axis=1) for a, b in pairs))
        if off.max() <= ANGLE:
            return None
        place = int(np.argmax(off > ANGLE))
        return Fault(
            f"block {layer}", self.trained, self.own, None, place, float(off.max()), ANGLE, layer
        )

    def _logits(self) -> Fault | None:
        names, others = (
            [n for n in side.config.shapes() if ".layers." not in n and n != TABLE]
            + [TABLE] * side.config.tied
            for side in (self.trained, self.own)
        )
        weights = self._read(names, others)
        ends = self.starts[1:] - 1
        whole = len(self.tokens) * self.trained.config.vocab <= MOST
        rows = np.arange(len(self.tokens)) if whole else ends
        pairs = zip(self.passes, weights.passes, strict=True)
        vocab = min(side.config.vocab for side in (self.trained, self.own))
        logits = [each.logits(own, rows)[:, :vocab] for each, own in pairs]
        self.exact &= np.array_equal(logits[0], logits[1])
        amount = _amount(*logits)
        self.last = amount
        if amount.row is not None:
            amount = amount._replace(row=int(rows[amount.row]))
        self.ends = [each[np.searchsorted(rows, ends)] for each in logits]
        fault = self._faulty("logits", amount, weights, -1)
        if fault is None and self._same_weights(weights):
            last = self.trained_settings
            last.branch, last.stream = self.passes[1].branch, self.passes[1].stream
            other = last.logits(weights.own, rows)[:, :vocab]
            fault = self._other_settings("logits", other, logits[1], -1)
        return fault or self._answer(self.ends)

    def _answer(self, logits: Sequence[Array]) -> Fault | None:
        """Return a fault if the most likely token after a prompt differs, unless both are close."""
        before, after, shaken = logits
        for number, (x, y, z) in enumerate(zip(before, after, shaken, strict=True)):
            expected, actual = int(x.argmax()), int(y.argmax())
            gap = float(x[expected] - x[actual])
            # a gap is the difference of two logits, each off by MARGIN of the noise at most
            bound = 2 * MARGIN * float(np.sqrt(np.mean((z - y) ** 2)))
            if gap > bound:
                token = int(self.starts[number + 1] - self.starts[number])
                ids = ([expected], [actual])
                sides = self.trained, self.own
                return Fault("answer", *sides, number, token, gap, bound, ids=ids)
        return None


@dataclass
class _Weights:
    """Parameters by name: trained; of the file; moved by rounding; of the file, as trained."""

    trained: dict[str, Array]
    own: dict[str, Array]
    shaken: dict[str, Array]
    stored: dict[str, Array]
    suspects: list[Suspect] = field(default_factory=list)

    @property
    def passes(self) -> tuple[dict[str, Array], ...]:
        """The weights of the three passes."""
        return self.trained, self.own, self.shaken


# ---- ends ---------------------------------------------------------------------------------------
def _end(trained: Side, own: Side) -> Fault | None:
    """Return a fault if the reader does not stop at an end of answers, or has fewer positions."""
    missing = [n for n in trained.needed_ends(own) if n not in own.ends]
    if missing or own.config.positions < trained.config.positions:
        return Fault("end", trained, own, ids=(missing, []))
    return None
