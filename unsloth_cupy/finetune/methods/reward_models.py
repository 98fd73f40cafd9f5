"""Reward models: sequence classifiers with one output; the logit of a whole text is its reward.

The text is a prompt and an answer in the format of ``--method reward``: the tokenizer and the chat
template of the reward model, and the token that ends an answer.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...memory.planned import as_input
from ...models.configs.heads import SEQUENCE
from ...models.text.chat import Span
from ...models.text.tokenizer import check_tokens
from ...placement import to_device_of, to_numpy
from ..data.chat import Chat
from ..data.messages import shown
from ..data.spans import encoded
from ..data.tokenizer import load_tokenizer
from ..data.turns import end_tokens
from ..naming import named

AT_ONCE = 8  # texts that share a row


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A reward model, and the weight of its rewards in the total reward.

    Attributes
    ----------
    path : Path
        The folder of the model, or of an adapter.
    model : Transformer or Config, optional
        The model, or its config before it is loaded.
    """

    name: str
    weight: float
    path: Path
    model: Any = None

    def check(self, columns: Any) -> None:
        """Do nothing: a reward model reads no columns."""

    def with_model(self, read: Callable[[Path], Any]) -> "RewardModel":
        """Return this reward with ``read(path)`` as its model.

        Raises
        ------
        ConfigError
            The model is not a sequence classifier with one output.
        """
        model = read(self.path)
        config = getattr(model, "config", model)
        if config.head != SEQUENCE or config.labels != 1:
            has = f"{config.head} with {config.labels} outputs" if config.labels else config.head
            problem = f"{named(reward=self.path)} holds a model with the head {has}"
            raise ConfigError(f"{problem}; pass one from {named(method='reward')}, with one output")
        return dataclasses.replace(self, model=model)

    def begin(
        self, columns: Mapping[str, Sequence[Any]], place: Callable[[int], str], **more: Any
    ) -> Callable[[], Array]:
        """Return a function that returns the reward of each answer, (answers,)."""

        def finish() -> Array:
            words, config = self.model.words, self.model.config
            tokenizer, chat = load_tokenizer(words), Chat(words)
            ends = [token for token in config.end_tokens if token < config.vocab]
            if any(isinstance(each, list) for each in columns["completions"]):
                ends = end_tokens(chat, tokenizer, config)
            texts = list[Array]()
            each = zip(*(columns[name] for name in ("prompts", "completions")), strict=True)
            for number, (prompt, answer) in enumerate(each):
                tools = more["tools"][number] if more.get("tools") else None
                try:
                    texts.append(self._tokens(tokenizer, chat, ends, prompt, answer, tools))
                except ConfigError as error:
                    raise ConfigError(
                        f"{place(number)}: the reward {self.name}: {error}"
                    ) from error
            return self._scores(texts)

        return finish

    def _tokens(
        self,
        tokenizer: Any,
        chat: Chat,
        ends: Sequence[int],
        prompt: Any,
        answer: Any,
        tools: Any,
    ) -> Array:
        """Return the tokens of a prompt and its answer, (tokens,)."""
        is_chat = isinstance(answer, list)
        if is_chat and chat.own:
            text = chat.text([*prompt, *answer], tools=tools)
            tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        else:
            text, spans = f"{prompt}{answer}", [Span(len(prompt), len(prompt) + len(answer))]
            if is_chat:
                text, spans, _ = chat.spans([*prompt, *answer], tools)[-1]
            tokens = encoded(tokenizer, text, spans, is_chat, ends, chat)[0]
        most = self.model.config.positions
        if not 0 < len(tokens) <= most:
            has = f"has {len(tokens)} tokens, and {self.path} has {most} positions"
            cure = f"reduce {named('max_new_tokens')}, or use another reward model"
            raise ConfigError(f"the text {shown(text)} {has}; {cure}")
        check_tokens(tokenizer, [int(tokens.max())], self.model.config.vocab)
        return tokens

    def rehearse(self, texts: int, length: int) -> None:
        """Compute the outputs of ``texts`` texts of this length on planned arrays."""
        ends = length * np.arange(min(texts, AT_ONCE) + 1)
        whole = np.zeros((1, ends[-1]), np.int64)
        tokens, offsets = (as_input(each, self.model.table) for each in (whole, ends))
        self.model.logits(tokens, offsets=offsets)

    def _scores(self, texts: Sequence[Array]) -> Array:
        """Return the output of each text; ``AT_ONCE`` texts share a row."""
        result = np.zeros(len(texts))
        for first in range(0, len(texts), AT_ONCE):
            own = texts[first : first + AT_ONCE]
            ends = np.cumsum([0, *map(len, own)])
            tokens, offsets = (
                to_device_of(each, self.model.table) for each in (np.concatenate(own)[None], ends)
            )
            logits = to_numpy(self.model.logits(tokens, offsets=offsets))
            result[first : first + AT_ONCE] = logits[:, 0]
        if not np.isfinite(result).all():
            problem = f"{self.path} computes rewards that are not finite"
            raise ConfigError(f"{problem}; copy the model again, or use another {named('dtype')}")
        return result
