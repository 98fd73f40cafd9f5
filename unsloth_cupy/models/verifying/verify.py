"""Why a file answers differently from the trained model: ``verify``.

Both sides compute the same prompts, stage by stage, with at most two blocks of weights in memory:

    template     text of a prompt
    tokens       its token ids
    embedding    rows of the embedding table
    block N      output of each block
    logits       of the next token
    answer       the most likely tokens along the greedy answer of the trained model
    end          tokens at which the reader stops, the end of the answer, and the context

A third pass moves the weights of the file by errors as large as its types round: see ``rounding``.
For the states x of a token, with y of the file and z of the third pass,

    difference = |y - x| / |x|                bound = MARGIN max |z - y| / |x|, over all tokens

The rounding of rotary angles is added to the bound.
"""

import math
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
from ...training.find_nan import NonFiniteError
from ..adapters.probe import Unread
from ..configs.config import Config, Experts
from ..configs.heads import CAUSAL
from ..configs.names import HEAD, TABLE, TABLE_OF_LAYERS
from ..gguf.opening import gguf_in
from ..layers.block import embedded, group_of_blocks, inputs_of_layers, with_positions
from ..layers.head import BIAS, logits_of
from ..layers.norms import join
from ..transformer import Transformer
from .causes import Fault, Suspect, differing, explained
from .llama_cpp import LlamaCpp, activations
from .modelfile import is_modelfile, read_modelfile
from .rounding import Rows, rows_of, shaken
from .sides import Prompt, Side, file_side, folder_side

# The errors of a file have another direction than errors that are drawn.  For right files of all
# written families, tiny and random, a difference was up to 3.3 times the largest of the third pass.
MARGIN = 6.0
SETTINGS = 1e-5  # equal settings give equal bits; float32 rounds numbers of a file by 6e-8
ROW_MARGIN = 2.5  # |w' - w| <= h gives sqrt(3); the largest weight of a group may be cut off
MOST = 1 << 24  # logits of all tokens, at most; beyond it, those after prompts and in answers
TABLES = TABLE, TABLE_OF_LAYERS  # their rows are those of tokens
AT_ONCE = 1 << 22  # weights of a table or head that are read at a time: 16 MiB
ANSWER = 32  # most tokens of an answer
AGAIN = 1 << 31  # most weights that are read again for answers: 8 GiB in float32, some seconds
TURN = 2.0**-23  # rounding of an angle per position: a product with a number in float32
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
            amount = f"{self.difference:.2g}, and rounding explains up to {self.bound:.2g}"
            result = "equal bits" if self.exact else f"logits differ by {amount}"
            return f"same: {result} ({self.compared})"
        place = [f"prompt {self.prompt}"] * (self.prompt is not None)
        place += [f"token {self.token}"] * (self.token is not None)
        where = f", {' '.join(place)}" if place else ""
        amount = f": {self.difference:.2g}, and rounding explains up to {self.bound:.2g}"
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
    trained: Side,
    own: Side,
    prompts: Sequence[Prompt],
    *,
    beside: bool = False,
    again: int = AGAIN,
) -> Verification:
    """Return the comparison of two sides; answers read at most ``again`` weights again."""
    for side in (trained, own):
        if not side.config.causal or side.config.head != CAUSAL:
            results, kind = "embeddings", "a model without a head"
            if not side.config.causal:
                kind = "an encoder"
            elif side.config.labels:
                results, kind = "labels", "a classifier"
            cure = f"compare the {results} of both for a few texts"
            raise ConfigError(f"verify: {side.where} is {kind}, without next tokens; {cure}")
    _check(prompts)
    texts = _Texts(trained, own, prompts)
    fault = texts.fault()
    compared = f"{len(prompts)} prompts"
    if fault is None:
        answers = _answers(trained, texts.ids, again, own.config.vocab)
        compared += f", {sum(map(len, texts.ids)):,} tokens"
        length = max(1, *map(len, answers))
        compared += f", answers of {length} token{'s' * (length > 1)}"
        numbers = _Numbers(trained, own, texts.ids, answers, beside=beside)
        fault = numbers.fault() or _end(trained, own, texts.ids, answers)
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
        call = self.model.call(parameters, tokens[None], offsets=offsets, routers=[])
        keys = call.attention.keys._replace(shared={})  # what a block leaves for later ones
        self.call = call._replace(attention=call.attention._replace(keys=keys))
        self.routed: list[Array] = []  # experts of each token, by layers with experts
        self.branch: Any = None
        self.stream: Any = None
        self.inputs: Sequence[Any] = ()  # of layers
        self.shared: dict[str, Any] = {}  # what later blocks use again

    def embed(self, weights: Mapping[str, Array], places: Array) -> Array:
        """Set the states to embeddings, and return them; ``places`` are rows of the tables."""
        tokens, call = places[None], self.call._replace(parameters=weights)
        self.branch = embedded(self.config, weights, tokens)
        if self.config.embedding_norm is not None:
            self.branch = with_positions(call, tokens, self.branch)
        self.inputs = inputs_of_layers(self.config, weights, tokens, self.branch)
        return self.states()

    def begin_as(self, other: "_Pass") -> None:
        """Begin the next block with the states of another pass."""
        self.branch, self.stream = other.branch, other.stream
        self.inputs, self.shared = other.inputs, other.shared

    def run(
        self, layer: int, weights: Mapping[str, Array], routed: Sequence[Array] | None = None
    ) -> Array:
        """Run a block, or a pair of LongCat-Flash; return the states after it.

        ``routed`` are the experts of its tokens.
        """
        routers = list[Any]()
        routes = np.stack(routed, axis=2) if routed else None
        experts = self.call.experts._replace(routers=routers, routes=routes)
        call = self.call._replace(parameters=weights, experts=experts)
        with np.errstate(all="ignore"):  # states that are not finite are compared, too
            self.branch, self.stream, _, new = group_of_blocks(
                call, range(layer, layer + 1 + self.config.paired), self.branch, self.stream,
                self.inputs[layer : layer + 1], self.shared,
            )  # fmt: skip
        self.shared = {**self.shared, **new}
        self.routed += [np.asarray(each.experts) for each in routers]
        return self.states()

    def states(self) -> Array:
        """Return the residual stream, (tokens, hidden)."""
        whole = self.branch if self.stream is None else self.branch + self.stream
        return np.asarray(whole, np.float64).reshape(len(self.tokens), -1)

    def ended(self, outer: Mapping[str, Array], rows: Array) -> Array:
        """Return the input of the head at some tokens."""
        call, last = self.call._replace(parameters=outer), self.config.norms.last
        with np.errstate(all="ignore"):
            x = join(call, "model.", last, self.branch, self.stream)[0]
        return np.ascontiguousarray(x[:, rows])

    def logits(self, outer: Mapping[str, Array], x: Array) -> Array:
        """Return the logits of the tokens that the head in ``outer`` has."""
        with np.errstate(all="ignore"):
            return np.asarray(logits_of(self.config, outer, x)[0], np.float64)


class _Amount(NamedTuple):
    """A difference and its bound; ``row`` is the first token above the bound, or None."""

    difference: float
    bound: float
    row: int | None


class _Squares:
    """The squares of tokens' states or logits x, and of their differences; added in parts.

    The file has y, and z with its weights moved by rounding.
    """

    def __init__(self) -> None:
        self.size: Any = 0.0
        self.off: Any = 0.0
        self.noise: Any = 0.0

    def add(self, x: Array, y: Array, z: Array) -> "_Squares":
        """Add columns of x, y and z; return self."""
        with np.errstate(all="ignore"):
            self.size = self.size + np.einsum("ij,ij->i", x, x)
            self.off = self.off + np.einsum("ij,ij->i", y - x, y - x)
            self.noise = self.noise + np.einsum("ij,ij->i", z - y, z - y)
        return self

    def noises(self) -> Array:
        """Return |z - y| / |x| of each token; 0 if it is not finite."""
        own = np.sqrt(self.noise) / np.maximum(np.sqrt(self.size), 1e-30)
        return np.asarray(np.nan_to_num(own, nan=0.0, posinf=0.0))

    def amount(self, slack: float) -> _Amount:
        """Return the difference of the first row above its bound; the largest if all are below."""
        sizes = np.maximum(np.sqrt(self.size), 1e-30)
        off = np.nan_to_num(np.sqrt(self.off) / sizes, nan=np.inf)
        bound = MARGIN * float(self.noises().max()) + slack
        beyond = np.flatnonzero(off > bound)
        row = int(beyond[0] if len(beyond) else np.argmax(off))
        return _Amount(float(off[row]), bound, row if len(beyond) else None)


class _Best:
    """The most likely tokens x of training and y of the file, and training's logits of both."""

    def __init__(self, expected: Array) -> None:
        self.expected = expected  # tokens of answers; -1: the most likely one
        count = len(expected)
        self.tokens, self.own = expected.copy(), np.zeros(count, np.int64)
        self.best, self.own_best = np.full(count, -np.inf), np.full(count, -np.inf)
        self.logit, self.own_logit = np.full(count, -np.inf), np.full(count, -np.inf)

    def add(self, first: int, x: Array, y: Array) -> None:
        """Add logits of the tokens from ``first`` on."""
        rows = np.arange(len(x))
        place = x.argmax(axis=1)
        more = (x[rows, place] > self.best) & (self.expected < 0)
        self.best = np.maximum(self.best, x[rows, place])
        self.tokens[more] = first + place[more]
        here = (self.tokens >= first) & (self.tokens < first + x.shape[1])
        self.logit[here] = x[rows[here], self.tokens[here] - first]
        place = y.argmax(axis=1)
        more = y[rows, place] > self.own_best
        self.own[more], self.own_best[more] = first + place[more], y[rows, place][more]
        self.own_logit[more] = x[rows, place][more]


def _outer(config: Config) -> tuple[list[str], list[str]]:
    """Return the names of the parameters before the first block, and after the last one.

    Tables of tokens and the head are not among them: they are read in parts.
    """
    outer = [n for n in config.shapes() if ".layers." not in n and n not in (*TABLES, HEAD)]
    last = f"model.{config.norms.last}."
    before = [name for name in outer if name.startswith("model.") and not name.startswith(last)]
    return before, [name for name in outer if name not in before]


def _routes_alike(first: Experts | None, second: Experts | None) -> bool:
    """Return whether both sides can use the same experts for a token.

    Then both use the same experts: a rounded router may choose others, which is no fault.
    """
    names = ("count", "k", "scores", "groups", "top_groups", "corrected", "sparse")
    pairs = [(getattr(first, name, None), getattr(second, name, None)) for name in names]
    return first is not None and second is not None and all(a == b for a, b in pairs)


class _Numbers:
    """The states and logits of both sides, and of the file with weights moved by rounding."""

    def __init__(
        self,
        trained: Side,
        own: Side,
        ids: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        beside: bool = False,
    ) -> None:
        self.trained, self.own, self.beside = trained, own, beside
        self.ids, self.answers = ids, answers
        # the last token of an answer has no successor
        rows = [[*a, *b[:-1]] for a, b in zip(ids, answers, strict=True)]
        self.starts = np.cumsum([0, *map(len, rows)])
        self.slack = TURN * max(map(len, rows))
        self.tokens = np.concatenate([np.asarray(row, np.int64) for row in rows])
        self.readers = own.as_trained(trained.config)
        self.same_routers = _routes_alike(trained.config.experts, own.config.experts)
        self.settings_differ = bool(differing(trained.config, own.config))
        self.exact, self.last = True, _Amount(0.0, 0.0, None)
        self.counts: dict[str, int] = {}
        self.ends: list[Array] = []  # with ``beside``: logits after each prompt, of three passes

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
        for layer in range(0, config.layers, 1 + config.paired):
            yield self._angles(layer)
            yield self._block(layer)
        yield self._logits()

    def _place(self, row: int) -> tuple[int, int]:
        """Return the prompt of a packed token, and the token's place in it."""
        prompt = int(np.searchsorted(self.starts, row, side="right")) - 1
        return prompt, int(row - self.starts[prompt])

    def _counted(self, name: str) -> str:
        """Return the type of a parameter of the file, and count it."""
        kind = self.own.type_of(name)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return kind

    def _read(self, trained: dict[str, Array], names: Sequence[str]) -> "_Weights":
        """Return parameters of the file, compared with the trained ones.

        Trained parameters are dropped as soon as they are compared.
        """
        result, left = _Weights({}), [*trained]
        for name in names:
            result.own[name] = self.own.read(name)
            self._counted(name)
            if name in trained:
                left.remove(name)
                self._compare(name, trained.pop(name), result)
        for name in left:
            self._compare(name, trained.pop(name), result)
        result.same = self.settings_differ and not left and all(
            name in self.readers and self.readers[name] is None for name in names
        )  # fmt: skip
        return result

    def _compare(self, name: str, expected: Array, weights: "_Weights") -> None:
        """Add a parameter to the suspects if it differs by more than rounding."""
        if name not in self.readers:
            return
        reader = self.readers[name]
        own = weights.own.get(name) if reader is None else None
        stored = self._stored(name) if own is None else own
        rows = Rows(len(rows_of(expected))).add(expected, stored, self.own.type_of(name))
        self._judge(name, rows, weights.suspects)

    def _judge(self, name: str, rows: Rows, suspects: list[Suspect]) -> None:
        """Add a parameter to the suspects if a row differs by more than rounding."""
        self.exact &= rows.equal
        difference, bound, row = rows.worst()
        if not difference <= ROW_MARGIN * bound:
            suspects.append(Suspect(name, difference, ROW_MARGIN * bound, row))

    def _stored(self, name: str) -> Array:
        """Return a parameter of the file as the trained model has it."""
        reader = self.readers[name]
        array: Array = self.own.read(name) if reader is None else reader()
        return array

    def _faulty(
        self, stage: str, amount: _Amount, suspects: Sequence[Suspect], names: Sequence[str],
        layer: int = -1,
    ) -> Fault | None:  # fmt: skip
        """Return the fault of a stage, or None; the weights of the stage are read again."""
        if amount.row is None and not suspects:
            return None
        difference, bound, row = amount
        if row is None:  # prompts do not show the difference
            worst = max(suspects, key=lambda each: each.difference)
            difference, bound = worst.difference, worst.bound
        prompt, token = (None, None) if row is None else self._place(row)
        facts: dict[str, dict[str, Array]] = {}
        if suspects:
            names = [name for name in names if name in self.readers]
            facts["trained"] = {name: self.trained.read(name) for name in names}
            facts["stored"] = {name: self._stored(name) for name in names}
        return Fault(
            stage, self.trained, self.own, prompt, token, difference, bound, layer,
            suspects=suspects, weights=facts,
        )  # fmt: skip

    def _table(self, name: str, chosen: Array, suspects: list[Suspect]) -> list[Any]:
        """Return the chosen rows of both sides, and rows of the file moved by rounding.

        All rows are compared, some at a time.  A side without the table has None.
        """
        trained, own = (
            side.rows(name) if name in side.config.shapes() else None
            for side in (self.trained, self.own)
        )
        tables = [
            None if rows is None else np.concatenate([rows(slice(n, n + 1)) for n in chosen])
            for rows in (trained, own)
        ]
        if own is None or tables[1] is None:
            return [*tables, None]
        kind = self._counted(name)
        if trained is not None and name in self.readers:
            shape, reader = self.trained.config.shapes()[name], self.readers[name]
            stored = own if reader is None else reader().__getitem__
            compared = Rows(shape[0])
            for part in _parts(shape):
                compared.add(trained(part), stored(part), kind, part.start)
            self._judge(name, compared, suspects)
        return [*tables, shaken(name, tables[1].copy(), kind)]

    def _embedding(self) -> Fault | None:
        chosen, places = np.unique(self.tokens, return_inverse=True)
        suspects = list[Suspect]()
        tables = {name: self._table(name, chosen, suspects) for name in TABLES}
        names, others = (_outer(side.config)[0] for side in (self.trained, self.own))
        trained = {name: self.trained.read(name) for name in names}
        outer, weights = {**trained}, self._read(trained, others)
        states = []
        named = (outer, weights.own, self._moved(weights.own))
        for number, (each, others_of) in enumerate(zip(self.passes, named, strict=True)):
            own = {name: every[number] for name, every in tables.items()}
            states.append(each.embed({**others_of, **own}, places))
        if not np.isfinite(states[0]).all():
            raise ConfigError(f"verify: the embeddings of {self.trained.where} are not finite")
        suspects += weights.suspects
        names = [TABLE, *names]
        names += [TABLE_OF_LAYERS] * any(each.name == TABLE_OF_LAYERS for each in suspects)
        return self._faulty(
            "embedding", _Squares().add(*states).amount(self.slack), suspects, names
        )

    def _moved(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return copies of weights of the file, moved by rounding."""
        kinds = self.own.type_of
        return {name: shaken(name, array.copy(), kinds(name)) for name, array in weights.items()}

    def _block(self, layer: int) -> Fault | None:
        names, others = (
            [n for n in side.config.shapes() if n.startswith(side.config.prefix_of(layer))]
            for side in (self.trained, self.own)
        )
        first, second, third = self.passes
        trained = {name: self.trained.read(name) for name in names}
        states = [first.run(layer, trained)]
        if not np.isfinite(states[0]).all():
            problem = f"the states of {self.trained.where} after block {layer} are not finite"
            raise ConfigError(f"verify: {problem}; verify another checkpoint")
        routed = first.routed if self.same_routers else None
        weights, last = self._read(trained, others), self.trained_settings
        last.begin_as(second)
        states.append(second.run(layer, weights.own, routed))
        other = last.run(layer, weights.own, routed) if weights.same else None
        for name, array in weights.own.items():  # one by one, as all of them may not fit twice
            weights.own[name] = shaken(name, array, self.own.type_of(name))
            del array
        states.append(third.run(layer, weights.own, routed))
        stage, suspects = f"block {layer}", weights.suspects
        amount = _Squares().add(*states).amount(self.slack)
        del weights
        fault = self._faulty(stage, amount, suspects, names, layer)
        if fault is not None or other is None:
            return fault
        pair = _Squares().add(other, states[1], other)
        return self._other_settings(stage, pair, np.arange(len(self.tokens)), layer)

    def _other_settings(
        self, stage: str, pair: _Squares, rows: Array, layer: int = -1
    ) -> Fault | None:
        """Return a fault if the file's weights give something else with the trained settings.

        No rounding of types is in this difference, (other, own) in ``pair``.
        """
        sizes = np.maximum(np.sqrt(pair.size), 1e-30)
        off = np.nan_to_num(np.sqrt(pair.off) / sizes, nan=np.inf)
        most = SETTINGS + self.slack
        beyond = np.flatnonzero(off > most)
        if not len(beyond):
            return None
        row = int(beyond[0])
        place, amounts = self._place(int(rows[row])), (float(off[row]), most)
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

    # ---- logits and answers ---------------------------------------------------------------------
    def _rows(self) -> tuple[Array, Array]:
        """Return the tokens whose logits are compared, and the expected next tokens or -1."""
        expected = np.full(len(self.tokens), -1)
        chosen = np.zeros(len(self.tokens), bool)
        for start, ids, answer in zip(self.starts, self.ids, self.answers, strict=False):
            end = start + len(ids) - 1
            chosen[end : end + max(1, len(answer))] = True
            expected[end : end + len(answer)] = answer
        if len(self.tokens) * self.trained.config.vocab <= MOST:
            chosen[:] = True
        return np.flatnonzero(chosen), expected[chosen]

    def _logits(self) -> Fault | None:
        names, others = (_outer(side.config)[1] for side in (self.trained, self.own))
        head, own_head = (TABLE if s.config.tied else HEAD for s in (self.trained, self.own))
        trained = {name: self.trained.read(name) for name in names}
        outer = {**trained}
        weights, (rows, expected) = self._read(trained, others), self._rows()
        passes, outers = [*self.passes], [outer, weights.own, self._moved(weights.own)]
        if weights.same and head == own_head in self.readers and self.readers[head] is None:
            last = self.trained_settings
            last.begin_as(self.passes[1])
            passes, outers = [*passes, last], [*outers, weights.own]
        inputs = [each.ended(own, rows) for each, own in zip(passes, outers, strict=True)]
        whole, suspects = self.trained.rows(head), weights.suspects
        kind = self.own.type_of(TABLE) if own_head == TABLE else self._counted(HEAD)
        compared = head == own_head == HEAD in self.readers
        shape, own_rows = self.own.config.shapes()[own_head], self.own.rows(own_head)
        differences = Rows(self.trained.config.shapes()[head][0])
        stored = self._stored(HEAD) if compared and self.readers[HEAD] is not None else None
        squares, settings, best = _Squares(), _Squares(), _Best(expected)
        vocab = min(side.config.vocab for side in (self.trained, self.own))
        ends = np.searchsorted(rows, self.starts[:-1] + [len(each) - 1 for each in self.ids])
        kept = list[list[Array]]()
        for part in _parts((vocab, shape[1])):
            expect, own = whole(part), own_rows(part)
            if compared:
                differences.add(expect, own if stored is None else stored[part], kind, part.start)
            moved_own = shaken(f"{own_head}.{part.start}", own.copy(), kind)
            heads = (head, expect), (own_head, own), (own_head, moved_own), (head, own)
            logits = [
                each.logits(_cut(outside, part) | {name: array}, x)
                for each, outside, (name, array), x in zip(
                    passes, outers, heads, inputs, strict=False
                )
            ]
            x, y, z = logits[:3]
            self.exact &= np.array_equal(x, y)
            squares.add(x, y, z)
            best.add(part.start, x, y)
            if len(logits) > 3:
                settings.add(logits[3], y, y)
            if self.beside:
                kept.append([each[ends] for each in logits[:3]])
        self.ends = [np.concatenate(each, axis=1) for each in zip(*kept, strict=True)]
        if compared:
            self._judge(HEAD, differences, suspects)
        del whole, stored
        amount = self.last = squares.amount(self.slack)
        if amount.row is not None:
            amount = amount._replace(row=int(rows[amount.row]))
        fault = self._faulty("logits", amount, suspects, [*names, head])
        if fault is None and len(passes) > 3:
            fault = self._other_settings("logits", settings, rows)
        noise = squares.noises().max() * np.sqrt(squares.size / vocab)
        return fault or self._answer(rows, best, noise)

    def _answer(self, rows: Array, best: _Best, noise: Array) -> Fault | None:
        """Return a fault if a token of a greedy answer differs, unless both logits are close.

        The file gets the answer of the trained model up to this token.
        """
        for number, (ids, answer) in enumerate(zip(self.ids, self.answers, strict=True)):
            first = int(np.searchsorted(rows, self.starts[number] + len(ids) - 1))
            for place in range(first, first + max(1, len(answer))):
                # a gap is the difference of two logits, each off by MARGIN of the noise at most
                gap = float(best.logit[place] - best.own_logit[place])
                bound = 2 * MARGIN * float(noise[place])
                if gap > bound:
                    token = len(ids) + place - first
                    both = [int(best.tokens[place])], [int(best.own[place])]
                    sides = self.trained, self.own
                    return Fault("answer", *sides, number, token, gap, bound, ids=both)
        return None


@dataclass
class _Weights:
    """Parameters of the file, and those that differ from the trained ones by more than rounding.

    ``same``: settings differ, and the file has the parameters of the trained settings.
    """

    own: dict[str, Array]
    suspects: list[Suspect] = field(default_factory=list)
    same: bool = False


def _parts(shape: Sequence[int]) -> Iterator[slice]:
    """Yield slices of the rows of a table or a head that are read at a time."""
    rows, columns = shape
    step = max(1, AT_ONCE // columns)
    for top in range(0, rows, step):
        yield slice(top, min(top + step, rows))


def _cut(outer: Mapping[str, Array], part: slice) -> dict[str, Array]:
    """Return parameters outside of the blocks, with the part of the head's bias."""
    return {name: array[part] if name == BIAS else array for name, array in outer.items()}


def _answers(side: Side, ids: Sequence[Sequence[int]], budget: int, vocab: int) -> list[list[int]]:
    """Return the greedy answers to prompts, with their stop tokens; [] without an answer.

    They are generated block by block, so each token reads all weights again.  They end before a
    token that the other side, which has ``vocab`` tokens, does not have.
    """
    config, longest = side.config, max(map(len, ids))
    weights = sum(math.prod(shape) for shape in config.shapes().values())
    most = min(ANSWER, budget // weights, config.positions - longest)
    if most < 2:
        return [[] for _ in ids]
    parameters: dict[str, Any] = dict.fromkeys(config.shapes(), Unread())
    tables = [name for name in TABLES if name in parameters]
    parameters |= {name: side.read(name) for name in (*tables, *_outer(config)[0])}
    model = Transformer(config, parameters, side.texts)
    model.gather = lambda named: {
        name: side.read(name) if isinstance(value, Unread) else value
        for name, value in named.items()
    }
    tokens = np.zeros((len(ids), longest), np.int64)
    real = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(ids):
        tokens[row, longest - len(prompt) :], real[row, longest - len(prompt) :] = prompt, True
    stops = sorted(side.stops)
    try:
        rows = model.generate(tokens, mask=real, max_new_tokens=most, stop=stops)[:, longest:]
    except NonFiniteError:  # the stages name the place
        return [[] for _ in ids]
    ends = (
        next((n + (t < vocab) for n, t in enumerate(row) if t in stops or t >= vocab), most)
        for row in rows
    )
    return [[int(n) for n in row[:end]] for row, end in zip(rows, ends, strict=True)]


# ---- ends ---------------------------------------------------------------------------------------
def _end(
    trained: Side, own: Side, ids: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Fault | None:
    """Return a fault if the reader stops at other tokens of answers, or has fewer positions."""
    missing = [n for n in trained.needed_ends(own) if n not in own.ends]
    if missing or own.config.positions < trained.config.positions:
        return Fault("end", trained, own, ids=(missing, []))
    for number, answer in enumerate(answers):
        for place, token in enumerate(answer, len(ids[number])):
            stops, stopped = token in trained.stops, token in own.ends
            if stops != stopped:
                both = ([token] * stops, [token] * stopped)
                return Fault("end", trained, own, number, place, ids=both)
    return None
