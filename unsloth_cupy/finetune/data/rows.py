"""Kinds of rows, the methods of training that read them, and what examples need of a method."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

TEXTS, PAIRS, RATED = "texts", "pairs", "rated"  # what rows hold
SCORED = "scored pairs"  # pairs that may have margins
LABELLED, RELATED, PROMPTS = "labelled texts", "related texts", "prompts"
KINDS: Mapping[str, tuple[str, ...]] = {  # that a method reads; files are read as the first of them
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
    """Return names in words."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


@dataclasses.dataclass(frozen=True)
class Format:
    """How rows become examples: each is a text of which the answers are learned.

    Attributes
    ----------
    losses : tuple of str
        What the setting ``loss`` may be; the first is the default.
    group : int
        Texts that belong together.
    unit : str
        What the loss is a mean of, in the plural.
    sums : int
        How many numbers the loss adds to the sink; 0: rows are texts, any number in an example.
    plain : bool
        Whether all of a text is learned, as the tokenizer writes it.
    is_on_policy : bool
        Whether rows are prompts, to which the model draws the answers.
    max_new_tokens : int
        The tokens of such an answer at most.
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
        """Whether examples have the log-probabilities of a reference model."""
        return False

    @property
    def summary(self) -> str:
        """What the data tell, in words."""
        return ""

    @property
    def samples(self) -> int:
        """The number of answers to a prompt, if it draws them."""
        return 1

    def texts(self, record: Any) -> list[str]:
        """Return the texts of a record, all of which is read."""
        return [record.answer]

    def value(self, record: Any) -> float:
        """Return what it knows of a record, as a number."""
        return record.value or 0.0
