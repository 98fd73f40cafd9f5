"""Compare two stored models by what they compute for a few tokens, one block in memory at a time.

Each row of hidden states or logits is compared: |after - before| / |before|, the largest of all
rows; of a mixture the median, since a rounded router may choose another expert for a token.
"""

from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...training.checkpoint import CheckpointConfig
from ..configs.heads import NONE
from ..configs.names import ADAPTED, TABLE
from ..folders.stored import StoredModel
from ..objective import TrainingStep
from ..transformer import Transformer

ROWS, TOKENS = 2, 8
ROUNDING = 32.0  # times the distance of 1 and the next number: what rounded weights may change
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
LEAST = 1e-3  # of sums in another order


class Unread:
    """A parameter that is read when its block runs."""


def probed(model: StoredModel, tokens: Array) -> Array:
    """Return what a stored model computes for tokens in float32, (rows, numbers)."""
    adapter, parameters = model.adapter, dict[str, Any](dict.fromkeys(model.homes, Unread()))
    own = {} if adapter is None else adapter.parameters
    rounds = adapter is not None and adapter.into is not None  # as a file has the weights

    def read(name: str) -> Any:
        if rounds:
            return model.merged(name, FLOAT32, exact=False)
        head = own.get(ADAPTED + name)  # which the base may lack
        return model.read(name, FLOAT32) if head is None else head

    parameters[TABLE] = read(TABLE)
    whole = Transformer(model.config, parameters, model.texts)
    whole.step = TrainingStep(CheckpointConfig())  # blocks are gathered one by one
    whole.adapter = None if rounds else adapter
    whole.gather = lambda named: {
        name: read(name) if isinstance(value, Unread) else value for name, value in named.items()
    }
    numbers: Array = whole.embeddings(tokens) if whole.head == NONE else whole.logits(tokens)
    return numbers.reshape(-1, numbers.shape[-1])


def check_same(call: str, before: StoredModel, after: StoredModel, dtype: "np.dtype[Any]") -> float:
    """Return by how much two models differ; raise where rounding to a dtype does not explain it.

    The tokens of which an adapter has rows are among those that are compared.

    Raises
    ------
    ConfigError
        They differ by more.
    """
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, before.config.vocab, ROWS * TOKENS)
    own = [] if before.adapter is None else [*before.adapter.tokens.get(TABLE, ())]
    tokens[: len(own[:TOKENS])] = own[:TOKENS]
    tokens = tokens.reshape(ROWS, TOKENS)
    first, second = (probed(model, tokens) for model in (before, after))
    sizes = np.linalg.norm(first, axis=-1)
    rows = np.linalg.norm(second - first, axis=-1) / np.where(sizes == 0, 1, sizes)
    difference = float(np.median(rows) if before.config.experts is not None else rows.max())
    most = max(LEAST, ROUNDING * EPS[dtype.name])
    if not difference <= most:
        problem = f"what is written computes other numbers than {before.path}: they differ by"
        problem += f" {difference:.2g} of their size, and rounding to {dtype} explains {most:.2g}"
        cure = "nothing was written: report this, and keep the adapter apart"
        raise ConfigError(f"{call}: {problem}; {cure}")
    return difference
