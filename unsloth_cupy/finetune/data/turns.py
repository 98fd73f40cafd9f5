"""What a chat template writes around the messages of a chat, found by rendering chats of words.

    without a system message   first Q answer A end next Q answer A end ...
    with one                   before S after Q answer A end next Q answer A end ...

Programs without the template's language need these pieces; the end of an answer has the token that
generation stops at, which may be another than the model's end of text.
"""

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError
from ...models.text.chat import Chat, Message

if TYPE_CHECKING:
    from ...models.configs.config import Config

SYSTEM, ASK, SAY, AGAIN = "zqsystem", "zqask", "zqsay", "zqagain"  # words that no template has


class Turns(NamedTuple):
    """The text around messages; ``system`` is (before, after), None if a template takes none."""

    system: tuple[str, str] | None
    first: str
    answer: str
    end: str
    next: str

    def text(self, messages: Sequence[Message]) -> str:
        """Return a chat that ends in a question as text, up to where its answer begins."""
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
    """What ends an answer: a token, or None, and its text, or the text where the next turn begins.

    The text is empty if the template marks no end.
    """

    token: int | None
    text: str


def ending_of(folder: Path, tokenizer: Any) -> Ending | None:
    """Return what the chat template of a folder ends an answer with; None without a template.

    Raises
    ------
    ConfigError
        The template is broken, or does not take a question and an answer.
    """
    chat = Chat(folder)
    return ending(chat, tokenizer) if chat.stored else None


def ending(chat: Chat, tokenizer: Any, known: Collection[int] = ()) -> Ending:
    """Return what a chat template ends an answer with.

    Of several tokens it is the first, or the first of ``known``, those that the model's config
    names, if that ends earlier answers too.
    """
    talk = [message("user", ASK), message("assistant", SAY)]
    last = chat.text(talk).rpartition(SAY)[2]
    (longer,) = chat.rendered([([*talk, message("user", AGAIN)], False)])
    earlier = longer.text.partition(SAY)[2].partition(AGAIN)[0]
    end = last if last.strip() else earlier  # the next question tells that the answer has ended
    added = tokenizer.get_added_tokens_decoder()
    tokens, others = (
        [n for n in tokenizer.encode(text, add_special_tokens=False).ids if n in added]
        for text in (end, earlier)
    )
    named = [n for n in tokens if n in known and n in others]
    for token in (*named[:1], *tokens[:1]):
        return Ending(token, added[token].content)
    return Ending(None, next(iter(end.split()), ""))


def end_tokens(chat: Chat, tokenizer: Any, config: "Config") -> list[int]:
    """Return the tokens that end what a model says: those of its config, and of its template."""
    try:
        token = ending(chat, tokenizer, config.end_tokens).token
    except ConfigError:  # the template takes other chats than a question and an answer
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
        The template writes messages in another way; the message says how.
    """
    ask, say, again = message("user", ASK), message("assistant", SAY), message("user", AGAIN)
    asking = functools.partial(chat.text, answer=True, today=False)  # equal files on any day
    whole = asking([ask, say, again])
    first, _, rest = whole.partition(ASK)
    answer, _, rest = rest.partition(SAY)
    between, _, last = rest.partition(AGAIN)
    end = chat.text([ask, say]).rpartition(SAY)[2]
    if not between.startswith(end):
        end = ""  # it is written once the next question comes
    system = None
    try:
        before, separator, rest = asking([message("system", SYSTEM), ask]).partition(SYSTEM)
        system = (before, rest.partition(ASK)[0]) if separator else None
    except ConfigError:
        pass  # the template takes no system message
    turns = Turns(system, first, answer, end, between.removeprefix(end))
    if last != answer:
        raise ConfigError("it writes an earlier answer differently from the last one")
    openings: list[list[Message]] = [[]] if system is None else [[], [message("system", "b c")]]
    for opening in openings:
        talk = [*opening, ask, say, again, message("assistant", "a.\nb"), message("user", "d?")]
        if asking(talk) != turns.text(talk):
            raise ConfigError("what it writes around a message depends on the other messages")
    return turns
