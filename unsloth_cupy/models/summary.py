"""What a model is, in one line, and how many parameters it has."""

import math
from typing import Any

from ..core import gpu
from ..core.dtypes import Stored
from ..machine import one_screen
from ..ops.quantized.weight import Quantized
from .folders.quantized_weights import FIXED


class Summary:
    """The methods of a model that describe it."""

    config: Any
    parameters: dict[str, Any]
    adapter: Any
    adapters: Any = ()
    table: Any

    def __repr__(self) -> str:
        """Return family, sizes, parameters, head, dtype, device, quantization and adapters."""
        own, table = self.config, self.table
        held = [each for each in self.parameters.values() if isinstance(each, Quantized)]
        kinds = sorted({getattr(each, "kind", each.KIND) for each in held})
        place = f"cuda:{gpu.number(table)}" if gpu.is_cupys(table.__class__) else "cpu"
        parts = [
            f"{own.layers} layers", f"hidden {own.hidden}",
            f"{own.heads} heads ({own.kv_heads} of keys)", f"vocabulary {own.vocab}",
            f"{self.num_parameters():,} parameters",
            f"head {own.head}" + f" of {own.labels} labels" * (own.labels > 0),
            f"{table.dtype} on {place}", *(f"{kind} weights" for kind in kinds),
        ]  # fmt: skip
        if self.adapters:
            parts.append(f"adapters by name: {', '.join(self.adapters)}")
        if self.adapter is not None:
            parts.append(f"adapter: {self.num_parameters(only_trainable=True):,} parameters")
        return one_screen(f"<{type(self).__name__} {own.model_type}: ", parts, ">")

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Return the number of parameters; a quantized weight has as many as the dense one.

        Those of an adapter are counted too; they alone are trainable then.  Without an adapter,
        the parameters that are not quantized are.  A tied head is the embedding, counted once.  Of
        a divided model, the parameters of this rank are counted.
        """
        own = [] if self.adapter is None else [*self.adapter.parameters.values()]
        values = [each for name, each in self.parameters.items() if not name.endswith(FIXED)]
        if only_trainable:
            values = [] if own else [each for each in values if not isinstance(each, Stored)]
        return sum(math.prod(each.shape) for each in (*values, *own))
