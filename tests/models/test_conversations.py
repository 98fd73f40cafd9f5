"""Rollouts of several turns: one text for each row, tools in threads, failures that end one row."""

import threading
import time
from enum import Enum
from typing import Any, Literal, Optional

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.models.generation import conversations, tools
from unsloth_cupy.models.text.chat import CHATML, CHATML_TOKENS
from unsloth_cupy.serving import scheduler

from ..serving.test_tool_calls import TEMPLATES
from .peers import MIXTURES

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640,
}  # fmt: skip
LABELS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2_moe", "phimoe longrope")
ORIGINAL = 64  # tokens of a row after which longrope turns all of them otherwise
PROMPTS = [[{"role": "user", "content": text}] for text in ("Who sees the cat?", "The dog does.")]
OPTIONS = {"samples": 3, "max_new_tokens": 120, "seed": 5, "temperature": 0.9}


def template_of(kind):
    template = TEMPLATES[kind].replace("<|{{ m.role[:1] }}|>", "<|im_start|>{{ m.role }}\n")
    return template.replace("<|a|>", "<|im_start|>assistant\n").replace("<|end|>", "<|im_end|>\n")


def model_of(folder, template=CHATML, **values):
    tokenizer = train_tokenizer("Who sees the cat? The dog does. " * 9, 300, CHATML_TOKENS)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0} | values
    models.create(config, seed=0).save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return models.load(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("models") / "model")


def short(monkeypatch, model, new=6):
    """End each answer by the template's token after some tokens."""
    end = model.tokenizer.encode("<|im_end|>", special_tokens=False)[0]
    choose = scheduler.choose

    def ended(logits, rows, ends, numbers):
        chosen = choose(logits, rows, ends, numbers)
        last = [row.count >= new - 1 + row.index for row in rows]
        return np.where(last, end, chosen)

    monkeypatch.setattr(scheduler, "choose", ended)


class Echo:
    """An environment that repeats answers, with reward 1 for each."""

    def reset(self, prompt):
        self.seen = []
        return f" ({len(prompt)})"

    def step(self, answer):
        self.seen.append(answer)
        return f"You wrote {len(self.seen)}", 1.0, len(self.seen) == 3


def text_of(model, row):
    return model.tokenizer.decode(row, special_tokens=True)


@pytest.mark.parametrize("invariant", [False, True])
def test_all_turns_of_a_row_are_one_text(model, monkeypatch, invariant):
    short(monkeypatch, model)
    drawn = model.rollouts(PROMPTS, environment=Echo, invariant=invariant, **OPTIONS)
    assert drawn.turns.tolist() == [3] * 6
    assert drawn.rewards.tolist() == [3.0] * 6
    assert drawn.errors == [None] * 6
    whole = model.log_probs(
        drawn.tokens, drawn.tokens, mask=drawn.real, temperature=0.9, invariant=invariant
    )
    expected = np.where(drawn.mask, whole.log_probs, 0)
    np.testing.assert_allclose(drawn.log_probs, expected, atol=0 if invariant else 1e-5)
    for row, (tokens, real) in enumerate(zip(drawn.tokens, drawn.real, strict=True)):
        text = text_of(model, tokens[real])
        content = PROMPTS[row // 3][0]["content"]
        begin = f"<|im_start|>user\n{content} (1)<|im_end|>\n<|im_start|>assistant\n"
        assert text.startswith(begin)
        answers = text.removeprefix(begin)
        for number in (1, 2):
            observed = f"\n<|im_start|>user\nYou wrote {number}<|im_end|>\n<|im_start|>assistant\n"
            assert answers.count(f"<|im_end|>{observed}") == 1
            answers = answers.replace(observed, "")
        assert text_of(model, tokens[1:][drawn.mask[row, :-1]]) == answers
        assert answers.endswith(("<|im_end|>", "<|endoftext|>"))
    assert len({*map(tuple, drawn.completions())}) == 6


def test_the_first_answers_are_those_of_rollouts_without_an_environment(model):
    class Once:
        def step(self, answer):
            return "", 0.5, True

    drawn = model.rollouts(PROMPTS, environment=Once, first=2, **OPTIONS)
    chats = [model.tokenizer.template.question(each, today=False) for each in PROMPTS]
    tokens = [model.tokenizer.encode(text, special_tokens=False) for text in chats]
    end = model.tokenizer.encode("<|im_end|>", special_tokens=False)[0]
    plain = model.rollouts(tokens, first=2, stop=[0, int(end)], **OPTIONS)
    assert drawn.completions() == plain.completions()
    np.testing.assert_array_equal(drawn.tokens, plain.tokens)
    np.testing.assert_array_equal(drawn.mask, plain.mask)
    np.testing.assert_allclose(drawn.log_probs, plain.log_probs, atol=1e-5)


def test_turns_and_tokens_are_limited(model, monkeypatch):
    class Endless(Echo):
        def step(self, answer):
            return "More", 1.0, False

    short(monkeypatch, model)
    drawn = model.rollouts(PROMPTS, environment=Endless, max_turns=4, **OPTIONS)
    assert drawn.turns.tolist() == [4] * 6
    few = model.rollouts(PROMPTS, environment=Endless, **OPTIONS | {"max_new_tokens": 40})
    after = few.real.sum(axis=1) - [row.argmax() for row in few.mask]
    assert after.max() <= 41
    assert set(few.turns) <= {1, 2}
    assert few.errors == [None] * 6


class Calculator:
    """Tools of which the last result is kept."""

    threads: set = set()  # noqa: RUF012 -- of all rows

    def reset(self, **row):
        self.results = []

    def add(self, a: int, text: str = "1") -> int:
        """Add numbers."""
        self.threads.add(threading.current_thread().name)
        self.results.append(a + int(text))
        return self.results[-1]

    def get_reward(self) -> float:
        return float(sum(self.results))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "text": "2"}}\n</tool_call>'


def scripted(monkeypatch, model, *answers):
    """Let the model draw answers in turns, each with the end token."""
    end = int(model.tokenizer.encode("<|im_end|>", special_tokens=False)[0])
    scripts = [[*model.tokenizer.encode(text).tolist(), end] for text in answers]

    def choose(logits, rows, ends, numbers):
        chosen = []
        for row in rows:
            text = text_of(model, row.request.prompt)
            turn = text.count("<|im_start|>assistant") - 1
            chosen.append(scripts[turn][row.count])
        return np.array(chosen)

    monkeypatch.setattr(scheduler, "choose", choose)


@pytest.mark.filterwarnings("ignore:.*fills the")  # its answers are scripted
def test_tools_are_called_and_their_results_follow(tmp_path, monkeypatch):
    model = model_of(tmp_path / "m", template_of("hermes"))
    wrong = CALL.replace("add", "sub") % 1 + "\n" + CALL.replace('"text"', '"b"') % 1
    scripted(monkeypatch, model, f"I add. {CALL % 5}\n{CALL % 7}", wrong, "It is 16.")
    options = OPTIONS | {"max_new_tokens": 900, "samples": 2}
    drawn = model.rollouts(PROMPTS, environment=Calculator, **options)
    assert drawn.errors == [None] * 4
    assert drawn.turns.tolist() == [3] * 4
    assert drawn.rewards.tolist() == [16.0] * 4
    assert threading.current_thread().name not in Calculator.threads
    text = text_of(model, drawn.tokens[0][drawn.real[0]])
    assert '"name": "add", "description": "Add numbers."' in text
    assert "tool\n7<|im_end|>\n<|im_start|>tool\n9<|im_end|>\n<|im_start|>assistant\n" in text
    assert "error: unknown tool sub; choose from add" in text
    assert "error: add: missing a required argument: 'a'" in text or "unexpected" in text
    assert text.endswith("It is 16.<|im_end|>")
    sampled = text_of(model, drawn.completions()[0])
    assert "tool\n" not in sampled.replace("<tool_call>\n", "")
    assert sampled.count("<|im_end|>") == 3


class Fails(Echo):
    """Rows 1 and 2 raise, row 3 is late, row 4 returns no text."""

    count = 0

    def __init__(self):
        self.number = Fails.count % 6
        Fails.count += 1

    def reset(self, prompt):
        super().reset(prompt)
        if self.number == 1:
            raise KeyError("lost")

    def step(self, answer):
        if self.number == 2:
            raise SystemExit("out")
        if self.number == 3:
            time.sleep(3)
        return super().step(answer) if self.number != 4 else (5, 1.0, False)


def test_an_environment_that_fails_ends_its_row_alone(model, monkeypatch):
    short(monkeypatch, model)
    Fails.count = 0
    drawn = model.rollouts(PROMPTS, environment=Fails, seconds=1.0, **OPTIONS)
    errors = dict(enumerate(drawn.errors))
    assert [errors.pop(5), errors.pop(0)] == [None, None]
    assert errors == {
        1: "row 1, turn 0: reset: KeyError: 'lost'",
        2: "row 2, turn 1: step: SystemExit: out",
        3: "row 3, turn 1: the environment took more than 1 s",
        4: "row 4, turn 1: step returned int; it must return a text, or None",
    }
    assert np.isnan(drawn.rewards).tolist() == [False, *[True] * 4, False]
    assert drawn.turns.tolist() == [3, 0, 1, 1, 1, 3]
    assert drawn.real.any(axis=1).all()
    assert not drawn.mask[1].any()


class Results:
    """A tool with another result in each row, and a reward that is not a number in row 4."""

    count = 0

    def __init__(self):
        self.number = Results.count
        Results.count += 1

    def look(self, place: int | None = None, kind: Literal["a", "b"] = "a") -> Any:
        """Look."""
        if self.number == 5:
            raise SilentError
        circular = [self]
        circular.append(circular)
        every = [{(1, 2): 3}, circular, "\ud800", SilentError(), "none", ""]
        every += [np.arange(3), np.int64(3)]
        return every[self.number]

    def get_reward(self):
        return float("inf") if self.number == 4 else 1.0


class SilentError(Exception):
    def __str__(self):
        raise KeyError


def test_a_result_that_is_no_text_ends_its_row_alone(tmp_path, monkeypatch):
    model = model_of(tmp_path / "m", template_of("hermes"))
    call = '<tool_call>\n{"name": "look", "arguments": {"place": null}}\n</tool_call>'
    scripted(monkeypatch, model, call, "It is.")
    Results.count = 0
    options = OPTIONS | {"max_new_tokens": 900, "samples": 4}
    drawn = model.rollouts(PROMPTS, environment=Results, seconds=float("inf"), **options)
    assert drawn.errors == [
        "row 0, turn 1: look returned a dict, which JSON cannot write: TypeError",
        "row 1, turn 1: look returned a list, which JSON cannot write: ValueError",
        "row 2, turn 1: look returned a surrogate without its pair, which is not text",
        "row 3, turn 1: look returned a SilentError, which JSON cannot write: KeyError",
        "row 4, turn 2: get_reward returned the reward inf; it must be a finite number",
        "row 5, turn 1: look: SilentError",
        None,
        None,
    ]
    texts = [text_of(model, row[real]) for row, real in zip(drawn.tokens, drawn.real, strict=True)]
    assert "tool\n[0, 1, 2]<|im_end|>" in texts[6]
    assert "tool\n3<|im_end|>" in texts[7]


@pytest.mark.filterwarnings("ignore:.*fills the")  # its answers are scripted
def test_arguments_of_other_types_are_read_as_errors(tmp_path, monkeypatch):
    model = model_of(tmp_path / "m", template_of("hermes"))
    call = '<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
    wrong = call % '{"place": "left"}', call % '{"kind": "c"}'
    scripted(monkeypatch, model, *wrong, "It is.")
    Results.count = 6
    options = OPTIONS | {"max_new_tokens": 900, "samples": 1}
    drawn = model.rollouts(PROMPTS[:1], environment=Results, **options)
    assert drawn.errors == [None]
    text = text_of(model, drawn.tokens[0][drawn.real[0]])
    assert 'error: look: place must fit {"type": "integer", "nullable": true}' in text
    assert 'error: look: kind must fit {"type": "string", "enum": ["a", "b"]}' in text


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Annotated:
    def every(
        self, text: str, count: int, part: float, flag: bool, any_value: Any, color: Color,
        one: Literal["a", "b"], number: Literal[1, 2], perhaps: Optional[int],  # noqa: UP045
        union: int | str, several: list[int] | str, lists: list[list[str]], plain: list,
        pair: tuple[int, str], table: dict[str, int], either: Literal["a"] | None, more: int = 5,
    ) -> list[int]:  # fmt: skip
        """Do everything.

        In two paragraphs.

        Args:
            text: A text, described
                in two lines.
            count (int): A number: of all.
            part: c
            flag: d
            any_value: e
            color: f
            one: g
            number: h
            perhaps: i
            union: j
            several: k
            lists: l
            plain: m
            pair: n
            table: o
            either: p
            more: q

        Returns:
            The numbers.
        """


@pytest.mark.parametrize(
    ("hint", "fit", "unfit"),
    [
        (int, [3, 3.0], [3.5, "3", True, None]),
        (float, [3, 0.5], ["3", True]),
        (list[int] | str | None, [[1], "a", None, []], [["a"], 3]),
        (dict[str, list[int]], [{}, {"a": [1]}], [{"a": 1}, []]),
        (Literal["a", 1, None], ["a", 1, None], ["b", 2]),
        (Any, [None, [1], {}], []),
    ],
    ids=str,
)
def test_values_fit_their_annotations(hint, fit, unfit):
    def look(value):
        """Look."""

    look.__annotations__["value"] = hint
    schemas = [tools.schema_of("look", look)]
    for value in (*fit, *unfit):
        problem = tools.problem_of({"look": look}, "look", {"value": value}, schemas)
        assert problem.startswith("error: look: value must fit") == (value in unfit), value


def test_schemas_are_those_of_transformers():
    utils = pytest.importorskip("transformers.utils", reason="needs the extra `peers`")
    actual, expected = (
        tools.schema_of("every", Annotated().every),
        utils.get_json_schema(Annotated().every),
    )
    own = actual["function"]["parameters"]["properties"].pop("several")
    assert own["anyOf"] == [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]
    expected["function"]["parameters"]["properties"].pop("several")  # without items
    assert actual == expected


class Variadic:
    def add(self, *numbers: int) -> int:
        """Add."""


class Asynchronous:
    async def add(self, a: int) -> int:
        """Add."""


class UnknownType:
    def add(self, a: list[bytes]) -> int:
        """Add."""


class NoTools:
    def reset(self):
        return None


class NoDocstring:
    def add(self, a: int) -> int:
        return a


class NoAnnotation:
    def add(self, a):
        """Add."""


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"environment": 5}, "pass a class, or a function"),
        ({"environment": NoTools}, "NoTools has neither; define step"),
        ({"environment": NoDocstring}, "the tool add has no docstring"),
        ({"environment": NoAnnotation}, "the parameter a of the tool add has no known type"),
        ({"environment": Variadic}, "the parameter numbers of the tool add has no name in a call"),
        ({"environment": Asynchronous}, "the tool add is async"),
        ({"environment": UnknownType}, "the parameter a of the tool add has no known type"),
        ({"environment": Calculator}, "chat template writes no tool calls"),
        ({"max_turns": 0}, "max_turns=0 must be 1 or more"),
        ({"seconds": 0}, "seconds=0 must be above 0"),
        ({"samples": 0}, "samples=0 must be 1 or more"),
        ({"prompts": [[5, 6]]}, "prompts are lists of messages"),
        ({"prompts": []}, "prompts are lists of messages"),
        ({"prompts": ["Who?"]}, "prompts are lists of messages"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(model, changed, match):
    options = {"prompts": PROMPTS, "environment": Echo} | OPTIONS | changed
    with pytest.raises(ConfigError, match=match) as error:
        model.rollouts(options.pop("prompts"), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("few", [False, True], ids=["all pages", "few pages"])
@pytest.mark.parametrize("label", LABELS)
def test_experts_of_all_turns_are_those_of_one_text(tmp_path, monkeypatch, label, few):
    """Also of prompts and observations in chunks, and of rows that are computed again."""
    values = {"num_hidden_layers": 3, "initializer_range": 0.2, **MIXTURES[label]}
    if label == "phimoe longrope":
        rope = {**values["rope_parameters"], "original_max_position_embeddings": ORIGINAL}
        values["rope_parameters"] = rope
    model = model_of(tmp_path / "m", **values)
    short(monkeypatch, model)
    set_back, back = [], scheduler.Scheduler._set_back

    def noted(self, row):
        set_back.append(len(row.tokens))
        back(self, row)

    monkeypatch.setattr(scheduler.Scheduler, "_set_back", noted)
    changed = {"chunk": 7} | ({"pages": 10} if few else {})
    engine = conversations.Engine
    monkeypatch.setattr(
        conversations, "Engine", lambda model, **sizes: engine(model, **sizes | changed)
    )
    drawn = model.rollouts(PROMPTS, environment=Echo, **OPTIONS)
    assert drawn.turns.tolist() == [3] * 6
    if label == "phimoe longrope":
        assert ORIGINAL + 1 in set_back
    assert few == any(size != ORIGINAL + 1 for size in set_back)
    experts = model.config.experts
    assert drawn.routes.shape == (*drawn.tokens.shape, sum(experts.sparse), experts.k)
    for tokens, real, routes in zip(drawn.tokens, drawn.real, drawn.routes, strict=True):
        own, seen = np.flatnonzero(real), []
        model.hidden(model.parameters, tokens[None, own[:-1]], routers=seen)
        expected = np.stack([each.experts[0] for each in seen], axis=1)
        np.testing.assert_array_equal(routes[own[:-1]], expected)
        assert (np.delete(routes, own[:-1], axis=0) == -1).all()


def test_observations_reuse_the_pages_of_earlier_turns(model, monkeypatch):
    """A turn computes its new tokens, and at most a page of earlier ones."""
    short(monkeypatch, model)
    engines, engine_of = [], conversations.Conversations._engine

    def noted(self):
        engines.append(engine_of(self))
        return engines[-1]

    monkeypatch.setattr(conversations.Conversations, "_engine", noted)
    drawn = model.rollouts(PROMPTS[:1], environment=Echo, **OPTIONS | {"samples": 1})
    (engine,) = engines
    assert engine.computed_rows <= drawn.real.sum() + 2 * conversations.PAGE
    assert engine.free_pages == len(engine.cache.uses)
