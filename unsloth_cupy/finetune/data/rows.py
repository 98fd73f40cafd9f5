"""Kinds of rows, the training methods that read them, and the format of examples of a method."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

TEXTS, PAIRS, RATED = "texts", "pairs", "rated"  # kinds of rows
SCORED = "scored pairs"  # pairs with an optional margin
LABELLED, RELATED, PROMPTS = "labelled texts", "related texts", "prompts"
KINDS: Mapping[str, tuple[str, ...]] = {  # of rows, by method; files are read as the first kind
    "sft": (TEXTS,),
    **dict.fromkeys(("dpo", "ipo", "simpo", "cpo", "orpo"), (PAIRS,)),
    "kto": (RATED, PAIRS),
    "classify": (LABELLED,),
    "reward": (SCORED, PAIRS),
    "embed": (RELATED,),
    **dict.fromkeys(("grpo", "rloo"), (PROMPTS,)),
    "distill": (TEXTS,),
}


def methods_of(kind: str) -> str:
    """Return the names of the methods that read rows of a kind."""
    return listing(name for name, kinds in KINDS.items() if kind in kinds)


def listing(names: Iterable[str]) -> str:
    """Return names as text: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of the examples of a method; by default texts whose answers are the targets.

    Attributes
    ----------
    losses : tuple of str
        Values of the setting ``loss``; the first is the default.
    group : int
        Number of consecutive texts that belong together.
    unit : str
        What the loss averages over, in the plural.
    sums : int
        Number of values that the loss appends to the sink; 0: examples are plain texts.
    plain : bool
        Whether texts are tokenized whole, without prompts and chat templates.
    is_on_policy : bool
        Whether rows are prompts, and the model samples the answers.
    max_new_tokens : int
        Maximum number of tokens of a sampled answer.
    """

    losses: tuple[str, ...] = ()
    group: int = 1
    unit: str = "tokens"
    sums: int = 0
    plain: bool = False
    is_on_policy: bool = False
    max_new_tokens: int = 0

    @property
    def compares(self) -> bool:
        """Whether examples store the log-probabilities of a reference model."""
        return False

    @property
    def summary(self) -> str:
        """A summary of the method for messages, completed from the data."""
        return ""

    @property
    def samples(self) -> int:
        """The number of sampled answers per prompt."""
        return 1

    def texts(self, record: Any) -> list[str]:
        """Return the texts of a record, for a method with ``plain``."""
        return [record.answer]

    def value(self, record: Any) -> float:
        """Return the value of a record as a number, such as its margin or label."""
        return record.value or 0.0
