"""The text that a chat template writes around messages, found by rendering placeholder chats.

    without a system message   first Q answer A end next Q answer A end ...
    with one                   before S after Q answer A end next Q answer A end ...

Programs that cannot run Jinja templates need these parts.  The end of an answer contains the token
that stops generation, which may differ from the end-of-text token of the model.
"""

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError
from ...models.text.chat import Chat, Message

if TYPE_CHECKING:
    from ...models.configs.config import Config

SYSTEM, ASK, SAY, AGAIN = "zqsystem", "zqask", "zqsay", "zqagain"  # words that occur in no template


class Turns(NamedTuple):
    """The text around messages; ``system`` is (before, after), or None if it is not accepted."""

    system: tuple[str, str] | None
    first: str
    answer: str
    end: str
    next: str

    def text(self, messages: Sequence[Message]) -> str:
        """Return a chat that ends with a question as text, up to the start of the answer."""
        parts, has_system = [], False
        for place, message in enumerate(messages):
            if message["role"] == "system" and self.system is not None:
                has_system = True
                parts += [self.system[0], message["content"], self.system[1]]
            elif message["role"] == "user":
                before = self.next if place > has_system else "" if has_system else self.first
                parts += [before, message["content"], self.answer]
            else:
                parts += [message["content"], self.end]
        return "".join(parts)


class Ending(NamedTuple):
    """The end of an answer: a token and its text; without a token, the text of the next turn.

    ``token`` is None if no added token ends an answer; the text is empty if the template marks no
    end.
    """

    token: int | None
    text: str


def ending_of(folder: Path, tokenizer: Any) -> Ending | None:
    """Return the end of an answer in the chat template of a folder; None without a template.

    Raises
    ------
    ConfigError
        The template is broken, or refuses a question and an answer.
    """
    chat = Chat(folder)
    return ending(chat, tokenizer) if chat.stored else None


def ending(chat: Chat, tokenizer: Any, known: Collection[int] = ()) -> Ending:
    """Return the end of an answer in a chat template.

    If the template writes several tokens, the end is the first of them; or, if one of the end
    tokens ``known`` from the model config also ends earlier answers, the first such token.
    """
    talk = [message("user", ASK), message("assistant", SAY)]
    last = chat.text(talk).rpartition(SAY)[2]
    (longer,) = chat.rendered([([*talk, message("user", AGAIN)], False)])
    earlier = longer.text.partition(SAY)[2].partition(AGAIN)[0]
    end = last if last.strip() else earlier  # without an end, the next question marks it
    added = tokenizer.get_added_tokens_decoder()
    tokens, others = (
        [n for n in tokenizer.encode(text, add_special_tokens=False).ids if n in added]
        for text in (end, earlier)
    )
    from_config = [n for n in tokens if n in known and n in others]
    for token in (*from_config[:1], *tokens[:1]):
        return Ending(token, added[token].content)
    return Ending(None, next(iter(end.split()), ""))


def end_tokens(chat: Chat, tokenizer: Any, config: "Config") -> list[int]:
    """Return the tokens that end an answer: the end tokens of the config and of the template."""
    try:
        token = ending(chat, tokenizer, config.end_tokens).token
    except ConfigError:  # the template refuses a chat of a question and an answer
        token = None
    every = dict.fromkeys((*config.end_tokens, *[token] * (token is not None)))
    return [each for each in every if each is not None and each < config.vocab]


def message(role: str, content: str) -> Message:
    """Return a message of a chat."""
    return {"role": role, "content": content}


def turns_of(chat: Chat) -> Turns:
    """Return the text around the messages of a chat.

    Raises
    ------
    ConfigError
        The template does not fit this scheme; the message contains the reason.
    """
    ask, say, again = message("user", ASK), message("assistant", SAY), message("user", AGAIN)
    asking = functools.partial(chat.text, answer=True, today=False)  # a fixed date
    whole = asking([ask, say, again])
    first, _, rest = whole.partition(ASK)
    answer, _, rest = rest.partition(SAY)
    between, _, last = rest.partition(AGAIN)
    end = chat.text([ask, say]).rpartition(SAY)[2]
    if not between.startswith(end):
        end = ""  # the template writes the end only before the next question
    system = None
    try:
        before, separator, rest = asking([message("system", SYSTEM), ask]).partition(SYSTEM)
        system = (before, rest.partition(ASK)[0]) if separator else None
    except ConfigError:
        pass  # the template refuses system messages
    turns = Turns(system, first, answer, end, between.removeprefix(end))
    if last != answer:
        raise ConfigError("it formats earlier answers differently from the last one")
    openings: list[list[Message]] = [[]] if system is None else [[], [message("system", "b c")]]
    for opening in openings:
        talk = [*opening, ask, say, again, message("assistant", "a.\nb"), message("user", "d?")]
        if asking(talk) != turns.text(talk):
            raise ConfigError("its text around a message depends on the other messages")
    return turns
