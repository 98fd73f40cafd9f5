"""Tokenizes a training text, and assigns its tokens to the target spans."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...models.text.chat import Span
from .chat import TAG, Chat

NOBODY = -1  # the span of a token that is no target


def encoded(
    tokenizer: Any, text: str, spans: Sequence[Span], is_chat: bool, ends: Sequence[int], chat: Chat
) -> tuple[Array, Array]:
    """Return the tokens of a text, (tokens,), and the index of the span of each, (tokens,).

    A token belongs to the span that it overlaps, or to ``NOBODY``.  Unless the template marks
    answers itself, an answer ends at the first end token after its words, where generation stops.
    An end token is appended, except to a chat in the template of the model, which writes all
    special tokens.
    """
    encoding = tokenizer.encode(text, add_special_tokens=not is_chat)
    tokens = np.asarray(encoding.ids, np.int64)
    places = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = places.T
    # offsets may skip spaces: a token of only spaces then begins where the previous token ended
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
        if open_end and tokens[after] in ends:  # the next question begins with an end token
            owners[after] = number
    if len(ends) and not (is_chat and (chat.own or ended)):
        if not len(tokens) or tokens[-1] not in ends:
            tokens, owners = np.append(tokens, ends[0]), np.append(owners, NOBODY)
        owners[-1] = len(spans) - 1
    return tokens, owners
