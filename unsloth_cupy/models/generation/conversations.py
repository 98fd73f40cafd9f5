"""Rollouts of several turns: the model answers, an environment responds, the model answers again.

    prompt | answer 1 | observation 1 | answer 2 | observation 2 | ...

A row is one text.  Its answers are sampled; the tokens of prompt and observations are those of the
chat template.  All rows share an engine; environments run in threads beside it.
"""

import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ...core.call import is_integer, is_number
from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...placement import to_device_of
from ...serving.engine import Engine
from ...serving.options import Options
from ...serving.requests import Request
from ...serving.tool_calls import CallForm, form_of
from ..configs.heads import CAUSAL, require_head
from ..network import Network
from ..text.chat import Message, placeholder
from ..text.tokenizer import Tokenizer
from .decoding import switch_of
from .rollouts import Rollouts, no_routes
from .tools import RowError, problem_of, result_text, schema_of, tools_of

SECONDS = 60.0  # default limit of a call of an environment
ROWS, PAGE = 64, 16  # of the engine
Work = Callable[[], Any] | None  # a call of an environment; None: an answer of the model


class Talk:
    """A row: its messages, its tokens so far, and what the environment returned."""

    def __init__(self, number: int, messages: Sequence[Message]) -> None:
        self.number, self.messages = number, [dict(each) for each in messages]
        self.tokens: list[int] = []
        self.sampled: list[bool] = []
        self.log_probs: list[Any] = []
        self.routes: list[Any] = []  # of the tokens that the model computed
        self.prompt, self.turns = 0, 0  # tokens, answers
        self.asked = len(self.messages)  # messages of the prompt
        self.calls = 0  # of the environment: late replies are dropped
        self.reward = float("nan")
        self.error: str | None = None

    def add(self, tokens: Sequence[int], log_probs: Sequence[Any] | None = None) -> None:
        """Add tokens: with log-probabilities an answer, else a prompt or an observation."""
        self.tokens += tokens
        self.sampled += [log_probs is not None] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs


class Conversations:
    """The rows of a call of ``rollouts`` with an environment."""

    def __init__(
        self,
        model: Network,
        prompts: Sequence[Sequence[Message]],
        samples: int,
        options: Options,
        environment: Callable[[], Any],
        *,
        max_turns: int,
        seconds: float | None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        tokenizer: Tokenizer | None = None,
        longest: int | None = None,
    ) -> None:
        self.tokenizer: Any = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
        _check(model, prompts, samples, options, environment, max_turns, seconds)
        if self.tokenizer is None:
            cure = 'set model.tokenizer = models.Tokenizer("folder")'
            raise ConfigError(f"rollouts: environment= needs the model's tokenizer; {cure}")
        self.model, self.options, self.environment = model, options, environment
        self.switch = switch_of(model.config)
        self.longest = longest  # tokens of a row, for which a training step has memory
        self.chat, self.max_turns = self.tokenizer.template, max_turns
        self.seconds = SECONDS if seconds is None else seconds
        columns = rows or [{"prompt": messages} for messages in prompts]
        self.columns = [each for each in columns for _ in range(samples)]
        every = [messages for messages in prompts for _ in range(samples)]
        self.talks = [Talk(number, messages) for number, messages in enumerate(every)]
        self.form: CallForm | None = None
        ends = options.ends(model.config.end_tokens, model.config.vocab).tolist()
        self.end, token = self._ending(prompts[0])
        self.ends = ends if token is None or options.stop is not None else [*ends, token]
        self.replies: queue.SimpleQueue[tuple[Talk, int, Any]] = queue.SimpleQueue()
        self.rows = {talk: self._row(talk) for talk in self.talks}
        self.limits: dict[Talk, float] = {}  # when the call of an environment is over
        self.waiting: list[Talk] = []  # for an answer
        self.asked: dict[Request, list[Talk]] = {}

    def _ending(self, messages: Sequence[Message]) -> tuple[str, int | None]:
        """Return the text that ends an answer, and its first token if that is an added one."""
        mark = placeholder(messages)
        text = self.chat.text([*messages, {"role": "assistant", "content": mark}])
        end = text.partition(mark)[2]
        ids = self.tokenizer.encode(end, special_tokens=False).tolist()
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return end, ids[0] if ids and ids[0] in added else None

    # ---- a row ---------------------------------------------------------------------------------
    def _row(self, talk: Talk) -> Generator[Work, Any, None]:
        """Hold a conversation; yield calls of the environment, and None for an answer."""
        environment = yield self.environment
        steps = callable(getattr(environment, "step", None))
        methods = {} if steps else tools_of(environment)
        tools = [schema_of(name, method) for name, method in methods.items()] or None
        yield from self._begin(talk, environment, tools)
        done = False
        if steps:
            talk.reward = 0.0
        while True:
            drawn, stopped = yield None
            talk.turns += 1
            answer = self.tokenizer.decode(drawn[: len(drawn) - stopped])
            talk.messages.append({"role": "assistant", "content": answer})
            if steps:
                reply = yield partial(environment.step, answer)
                observation, reward, done = _stepped(reply)
                talk.reward += reward
                results: list[dict[str, Any]] = [{"role": "user", "content": observation}]
            else:
                raw = self.tokenizer.decode(drawn[: len(drawn) - stopped], special_tokens=True)
                results = yield from self._called(raw, talk, methods, tools or [])
                done = not results
            if done or not stopped or talk.turns == self.max_turns:
                break
            between = self._between(talk.messages, results, tools)
            talk.messages += results
            new = self.tokenizer.encode(between, special_tokens=False).tolist()
            if new[:1] == drawn[-1:]:
                new = new[1:]  # the token that ended the answer
            if len(new) >= self._room(talk):
                break
            talk.add(new)
        if not steps and callable(getattr(environment, "get_reward", None)):
            reward = yield environment.get_reward
            talk.reward = float("nan") if reward is None else _number(reward, "get_reward")

    def _begin(
        self, talk: Talk, environment: Any, tools: list[dict[str, Any]] | None
    ) -> Generator[Work, Any, None]:
        """Reset the environment, and write the prompt."""
        if tools and self.form is None:
            self.form = form_of(self.chat)
            if self.form is None:
                raise ConfigError("rollouts: the model's chat template writes no tool calls")
        if hasattr(environment, "reset"):
            row = _accepted(environment.reset, self.columns[talk.number])
            first = yield partial(environment.reset, **row)
            if first is not None:
                talk.messages = _with_observation(talk.messages, _text(first, "reset"))
        talk.asked = len(talk.messages)
        prompt = self.chat.question(talk.messages, tools=tools, today=False)
        talk.add(self.tokenizer.encode(prompt, special_tokens=False).tolist())
        talk.prompt = len(talk.tokens)
        if self._room(talk) < 1:
            cure = "raise max_new_tokens, or tokens"
            raise RowError(f"a prompt of {talk.prompt} tokens leaves no room in rows; {cure}")

    def _room(self, talk: Talk) -> int:
        """Return the number of tokens that may follow in a row."""
        room = self.options.max_new_tokens - (len(talk.tokens) - talk.prompt)
        return room if self.longest is None else min(room, self.longest - len(talk.tokens))

    def completions(self) -> list[list[dict[str, Any]]]:
        """Return the messages of each row after its prompt: answers and observations."""
        nothing = {"role": "assistant", "content": ""}  # of a row that failed before its answer
        return [talk.messages[talk.asked :] or [nothing] for talk in self.talks]

    def _called(
        self, raw: str, talk: Talk, methods: Mapping[str, Any], tools: list[dict[str, Any]]
    ) -> Generator[Work, Any, list[dict[str, Any]]]:
        """Call the tools of an answer, the last message; return the messages of the results."""
        form: Any = self.form
        start = form.begins(raw)
        calls = None if start < 0 else form.calls(raw[start:], tools)
        if calls is None:
            return []
        written, results = list[dict[str, Any]](), list[dict[str, Any]]()
        talk.messages[-1] |= {"content": raw[:start], "tool_calls": written}
        for place, (name, arguments) in enumerate(calls[0]):
            own = f"call{place:05d}"  # nine letters or digits, as Mistral's templates require
            function = {"name": name, "arguments": arguments}
            written.append({"id": own, "type": "function", "function": function})
            result: Any = problem_of(methods, name, arguments, tools)
            if not result:
                result = yield partial(methods[name], **arguments)
            text = result_text(result, name)
            results.append({"role": "tool", "content": text, "name": name, "tool_call_id": own})
        return results

    def _between(self, history: Sequence[Message], results: Sequence[Message], tools: Any) -> str:
        """Return the text between an answer and the next one: the end, observations, the start."""
        before, after = self.chat.rendered(
            [(history, False), ([*history, *results], True)], tools=tools
        )
        for each in (before, after):
            if each.error:
                raise self.chat.refused(each.error)
        if not after.text.startswith(before.text):
            raise ConfigError("the chat template changes earlier turns when an observation follows")
        return self.end + after.text[len(before.text) :]

    # ---- all rows ------------------------------------------------------------------------------
    def run(self) -> Rollouts:
        """Hold all conversations; return them as rollouts."""
        for talk in self.talks:
            self._advance(talk, None)
        engine: Engine | None = None
        while self.rows:
            self._take_replies(wait=engine is None or not (self.asked or self.waiting))
            if self.limits and engine is None:
                continue  # the lengths of prompts, and so of the cache, are not known yet
            if self.waiting:
                engine = engine or self._engine()
                talks, self.waiting = sorted(self.waiting, key=lambda each: each.number), []
                self._submit(engine, talks)
            if engine is not None and self.asked:
                self._step(engine)
        return self._result()

    def _step(self, engine: Engine) -> None:
        """Compute a step of the engine; continue the rows whose answers have ended."""
        for request, place, _, _, finish, _ in engine.step():
            if finish is None:
                continue
            sample, talk = request.samples[place], self.asked[request][place]
            switch = self.switch  # from there on all tokens have other experts than before
            anew = switch is not None and len(talk.routes) < switch <= len(sample.routes)
            known = 0 if anew else len(talk.routes)  # of the passes that drew earlier answers
            talk.routes[known:] = sample.routes[known:]
            talk.add(sample.tokens, sample.log_probs)
            if finish == "error":
                self._advance(talk, None, "the logits contain NaN")
            else:
                self._advance(talk, (sample.tokens, finish == "stop"))
        self.asked = {request: own for request, own in self.asked.items() if not request.finished}

    def _advance(self, talk: Talk, value: Any, error: str | None = None) -> None:
        """Continue a row with a result, or end it with an error."""
        self.limits.pop(talk, None)
        talk.calls += 1
        try:
            if error is not None:
                raise RowError(error)
            work = self.rows[talk].send(value)
        except StopIteration:
            del self.rows[talk]
            return
        except ConfigError as problem:
            if not isinstance(problem, RowError) and not talk.turns:
                raise  # templates and tools that fit no row
            talk.error = f"row {talk.number}, turn {talk.turns}: {problem}"
            talk.reward = float("nan")
            del self.rows[talk]
            return
        if work is None:
            self.waiting.append(talk)
            return
        self.limits[talk] = time.monotonic() + self.seconds
        call = partial(self._call, talk, talk.calls, work)
        threading.Thread(target=call, daemon=True).start()

    def _call(self, talk: Talk, number: int, work: Callable[[], Any]) -> None:
        """Call an environment, in a thread of its own."""
        try:
            self.replies.put((talk, number, (work(), None)))
        except BaseException as error:
            what = getattr(getattr(work, "func", work), "__name__", "environment")
            problem = f"{what}: {type(error).__name__}"
            with suppress(Exception):  # of its own text
                problem = f"{problem}: {error}"
            self.replies.put((talk, number, (None, problem)))

    def _take_replies(self, *, wait: bool) -> None:
        """Continue rows whose environment has replied; end rows whose time is over."""
        while self.limits:
            rest = max(0.0, min(self.limits.values()) - time.monotonic())
            rest = min(rest, threading.TIMEOUT_MAX)
            try:
                talk, number, (value, error) = self.replies.get(timeout=rest if wait else 0)
            except queue.Empty:
                break
            if talk in self.limits and talk.calls == number:  # else it was late
                self._advance(talk, value, error)
                wait = False
        now = time.monotonic()
        for talk in [talk for talk, limit in self.limits.items() if limit <= now]:
            self._advance(talk, None, f"the environment took more than {self.seconds:g} s")

    def _engine(self) -> Engine:
        """Return an engine with pages for all its rows at their full lengths."""
        rows = min(ROWS, len(self.talks))
        longest = max(talk.prompt for talk in self.talks) + self.options.max_new_tokens
        pages = rows * -(-longest // PAGE)
        sizes: Any = {"rows": rows, "pages": pages, "page": PAGE}
        return Engine(self.model, **sizes, cache_dtype=self.options.cache_dtype, routes=True)

    def _submit(self, engine: Engine, talks: Sequence[Talk]) -> None:
        """Let the model answer; neighbours with equal prompts are samples of one request."""
        options, groups = self.options, list[list[Talk]]()
        for talk in talks:
            last = groups[-1][-1] if groups else None
            same = last is not None and not (last.turns or talk.turns)
            if same and last.number + 1 == talk.number and last.tokens == talk.tokens:  # type: ignore[union-attr]
                groups[-1].append(talk)
            else:
                groups.append([talk])
        for group in groups:
            talk = group[0]
            number = options.first + talk.number
            seed: Any = options.seed
            if talk.turns:  # further turns draw other numbers
                seed = int(np.random.default_rng([seed, number, talk.turns]).integers(1 << 63))
            request = engine.submit(
                talk.tokens,
                max_new_tokens=self._room(talk),
                samples=len(group), temperature=options.temperature, top_k=options.top_k,
                top_p=options.top_p, min_p=options.min_p, seed=seed, first=number,
                stop=self.ends, log_probs=True,
            )  # fmt: skip
            self.asked[request] = group

    def _result(self) -> Rollouts:
        """Return the rows as arrays: prompts padded on the left, what follows on the right."""
        talks = self.talks
        for talk in talks:
            if not talk.tokens:  # an environment failed before the first answer
                prompt = self.chat.question(talk.messages, today=False)
                talk.add(self.tokenizer.encode(prompt, special_tokens=False).tolist())
                talk.prompt = len(talk.tokens)
        before = max(talk.prompt for talk in talks)
        width = before + max(len(talk.tokens) - talk.prompt for talk in talks)
        tokens, real = np.zeros((len(talks), width), np.int64), np.zeros((len(talks), width), bool)
        dtype = np.result_type(FLOAT32, *(x for t in talks for x in t.log_probs[-1:]))
        mask, log_probs = np.zeros_like(real), np.zeros(real.shape, dtype)
        experts = self.model.config.experts
        routes = None if experts is None else no_routes(experts, tokens.shape)
        for row, talk in enumerate(talks):
            start = before - talk.prompt
            own = slice(start, start + len(talk.tokens))
            tokens[row, own], real[row, own] = talk.tokens, True
            # of the next token; the first token of a row is one of its prompt
            mask[row, start : own.stop - 1] = talk.sampled[1:]
            log_probs[row, start : own.stop - 1] = talk.log_probs[1:]
            if routes is not None and talk.routes:
                routes[row, start : start + len(talk.routes)] = talk.routes
        place = partial(to_device_of, like=self.model.table)
        return Rollouts(
            place(tokens), place(real), place(mask), place(log_probs),
            None if routes is None else place(routes),
            rewards=np.array([talk.reward for talk in talks]),
            turns=np.array([talk.turns for talk in talks]),
            errors=[talk.error for talk in talks],
        )  # fmt: skip


def _check(
    model: Network, prompts: Any, samples: Any, options: Options, environment: Any,
    max_turns: Any, seconds: Any,
) -> None:  # fmt: skip
    """Raise a ConfigError for arguments that do not fit."""
    require_head("rollouts", model.config, CAUSAL)
    if not callable(environment):
        cure = "pass a class, or a function that returns an object with step, or with tools"
        raise ConfigError(f"rollouts: environment={environment!r}; {cure}")
    numbers = {"samples": samples, "max_new_tokens": options.max_new_tokens, "max_turns": max_turns}
    for name, value in numbers.items():
        if not is_integer(value, 1):
            raise ConfigError(f"rollouts: {name}={value!r} must be 1 or more")
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise ConfigError(f"rollouts: seconds={seconds!r} must be above 0, or None")
    chats = isinstance(prompts, Sequence) and bool(prompts)
    if not chats or not all(_is_chat(each) for each in prompts):
        cure = '[[{"role": "user", "content": "..."}], ...]'
        raise ConfigError(f"rollouts: with an environment, prompts are lists of messages: {cure}")
    if options.cache is not None:
        raise ConfigError("rollouts: environment= has a cache of its own; leave cache= out")
    if model.division is not None:
        problem = "ranks that divide a model would each run the environments"
        raise ConfigError(f"rollouts: environment= does not work here: {problem}")


def _is_chat(messages: Any) -> bool:
    listed = isinstance(messages, Sequence) and not isinstance(messages, str) and bool(messages)
    return listed and all(isinstance(e, Mapping) and "role" in e for e in messages)


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _with_observation(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return messages with a text at the end of the last question, or as a question."""
    last = messages[-1]
    if last["role"] == "user" and isinstance(last.get("content"), str):
        return [*messages[:-1], last | {"content": last["content"] + text}]
    return [*messages, {"role": "user", "content": text}]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} returned {type(value).__name__}; it must return a text, or None")
    return result_text(value, name)


def _number(value: Any, name: str) -> float:
    """Return a reward, checked; NaN: none."""
    if not is_number(value) or math.isinf(value):
        raise RowError(f"{name} returned the reward {str(value)[:40]}; it must be a finite number")
    return float(value)


def _stepped(reply: Any) -> tuple[str, float, bool]:
    """Return what ``step`` returned, checked."""
    if not isinstance(reply, tuple) or len(reply) != 3:
        raise RowError("step must return (observation, reward, done)")
    observation, reward, done = reply
    return (
        "" if observation is None else _text(observation, "step"),
        _number(reward, "step"),
        bool(done),
    )
