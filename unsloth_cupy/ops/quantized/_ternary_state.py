"""A ternary weight as the arrays of a checkpoint, and of those the layer of BitNet."""

import json
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ...errors import ConfigError
from ...placement import placed, to_numpy
from ._state import array_of, json_of, named, stored_shape


def _inverse(scale: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 / scale.astype(np.float32)


class FolderForm:
    """What ``Ternary`` is written as beside a layer's name, and is read from."""

    shape: tuple[int, int]
    dtype: Any
    scale: Any
    planes: Any
    group: int | None
    activations: str | None
    pack: Any
    unpack: Any

    def state(self, inverse: bool = False) -> dict[str, Any]:
        """Return arrays by what follows a layer's name in a checkpoint.

        Of an inverse scale codes are divided by it, as BitNet's BitLinear has them.

        ``weight`` has the bytes of ``pack("bitnet")``.  Where they and ``weight_scale`` are all
        that there is to know, they are what Hugging Face's BitNet writes; else ``weight_form``
        tells the rest.
        """
        rows, columns = self.shape
        weight = np.frombuffer(self.pack("bitnet"), np.uint8).reshape(-(-rows // 4), columns)
        scale = self.scale.reshape(1) if self.scale.ndim == 0 else self.scale
        told = _inverse(scale) if inverse else scale
        narrow = told.astype(self.dtype)
        again = _inverse(narrow) if inverse else narrow
        like: Any = self.planes
        known = rows % 4 == 0 and scale.ndim == 1 and self.activations == "int8"
        if known and bool((again == scale).all()):
            return {"weight": placed(weight, like), "weight_scale": narrow}
        facts = {"shape": list(self.shape), "group": self.group, "dtype": self.dtype.name}
        text = json.dumps(facts | {"activations": self.activations}).encode()
        found = {"weight": placed(weight, like), "weight_scale": told}
        return found | {"weight_form": placed(np.frombuffer(text, np.uint8), like)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], inverse: bool = False) -> Self:
        """Return the weight of arrays that ``state`` gave, or of a layer of BitNet.

        Raises
        ------
        ConfigError
            An array is missing, or is not of the shape, the dtype or the values that the others
            ask for.
        RangeError
            A code or a scale is none.
        """
        call = "Ternary.from_state"
        weight, scale = (named(call, state).get(name) for name in ("weight", "weight_scale"))
        if weight is None or scale is None or getattr(weight, "ndim", 0) != 2:
            there = ", ".join(map(str, state))
            raise ConfigError(f"{call}: weight, a matrix, or weight_scale is missing among {there}")
        facts: dict[str, Any] = {"shape": [weight.shape[0] * 4, weight.shape[1]]}
        facts |= {"group": None, "dtype": scale.dtype.name, "activations": "int8"}
        if "weight_form" in state:
            facts = json_of(call, state, ["weight_form"])
        rows, columns = shape = stored_shape(call, facts)
        array_of(call, state, "weight", (-(-rows // 4), columns), np.uint8)
        array_of(call, state, "weight_scale", tuple(scale.shape), scale.dtype)
        whole = facts.get("group") is None and scale.shape == (1,) and scale.dtype.kind != "O"
        told = _inverse(to_numpy(scale)) if inverse else to_numpy(scale)
        return cls.unpack(
            to_numpy(weight),
            "bitnet",
            shape,
            scale=told.reshape(()) if whole else told,
            dtype=facts.get("dtype"),
            like=weight,
            group=facts.get("group"),
            activations=facts.get("activations"),
        )

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return what ``quantization_config`` says of such weights."""
        return {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "use_rms_norm": False,
        }
