"""The repr of a model, and its number of parameters."""

import math
from typing import Any

from ..core import gpu
from ..core.dtypes import Stored
from ..machine import one_screen
from ..ops.quantized.weight import Quantized
from .folders.quantized_weights import is_fixed


class Summary:
    """Base class with the methods that describe a model."""

    config: Any
    parameters: dict[str, Any]
    adapter: Any
    adapters: Any = ()
    table: Any

    def __repr__(self) -> str:
        """Return family, sizes, parameters, head, dtype, device, quantization and adapters."""
        own, table = self.config, self.table
        quantized = [each for each in self.parameters.values() if isinstance(each, Quantized)]
        kinds = sorted({getattr(each, "kind", each.KIND) for each in quantized})
        place = f"cuda:{gpu.number(table)}" if gpu.is_cupys(table.__class__) else "cpu"
        parts = [
            f"{own.layers} layers", f"hidden {own.hidden}",
            f"{own.heads} heads ({own.kv_heads} KV heads)", f"vocabulary {own.vocab}",
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
        """Return the number of parameters; a quantized weight counts as its dense weight.

        The parameters of an adapter count too, and only they are trainable.  Without an adapter,
        the parameters that are not quantized are trainable.  A tied head counts once, as the
        embedding.  In a divided model, only the parameters of this rank count.
        """
        own = [] if self.adapter is None else [*self.adapter.parameters.values()]
        values = [each for name, each in self.parameters.items() if not is_fixed(name)]
        if only_trainable:
            values = [] if own else [each for each in values if not isinstance(each, Stored)]
        return sum(math.prod(each.shape) for each in (*values, *own))
