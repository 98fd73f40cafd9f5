"""Which tokens of a text belong to its spans: the answers in it that are learned."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...models.text.chat import Span
from .chat import TAG, Chat

NOBODY = -1  # the span of a token that is not learned


def encoded(
    tokenizer: Any, text: str, spans: Sequence[Span], is_chat: bool, ends: Sequence[int], chat: Chat
) -> tuple[Array, Array]:
    """Return the tokens of a text, as the model reads them, and which span each belongs to.

    A token belongs to the span that it overlaps, or to ``NOBODY``.  An answer is over at the first
    end token behind its words, where generation stops, unless the template marks answers itself.  A
    text gets an end token if it is not a chat of a model's own template, which writes all special
    tokens.
    """
    encoding = tokenizer.encode(text, add_special_tokens=not is_chat)
    tokens = np.asarray(encoding.ids, np.int64)
    places = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = places.T
    # offsets may leave spaces out: a token of spaces alone then begins where the one before ended
    before = np.maximum.accumulate(np.append(0, stops))[:-1]
    spaces = (starts == stops) & (np.asarray(encoding.special_tokens_mask) == 0)
    starts = np.where(spaces, np.minimum(starts, before), starts)
    owners = np.full(len(tokens), NOBODY)
    ended = False
    for number, (start, stop) in enumerate(spans):
        empty = (starts == stops) & spaces  # the first one
        inside = np.flatnonzero((stops + empty > start) & (starts < stop))
        last = [
            place
            for place in np.flatnonzero(np.isin(tokens[inside], ends))
            if not TAG.sub("", text[stops[inside[place]] : stop]).strip()  # no words follow
        ]
        ended = is_chat and not chat.marked and len(last) > 0
        owners[inside[: last[0] + 1] if ended else inside] = number
        after = int(inside[-1]) + 1 if len(inside) else len(tokens)
        open_end = is_chat and chat.own and not ended and not chat.marked and after < len(tokens)
        if open_end and tokens[after] in ends:  # the answer ends as the next question begins
            owners[after] = number
    if len(ends) and not (is_chat and (chat.own or ended)):
        if not len(tokens) or tokens[-1] not in ends:
            tokens, owners = np.append(tokens, ends[0]), np.append(owners, NOBODY)
        owners[-1] = len(spans) - 1
    return tokens, owners
