"""A ternary weight as arrays of a checkpoint, in the format of Hugging Face's BitNet layers."""

import json
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ...core.call import check_options
from ...errors import ConfigError
from ...placement import check_library, to_device_of, to_numpy
from ._state import array_of, checked_state, json_of, stored_shape


def _inverse(scale: Any) -> Any:
    """Return 1 / scale in float32, and infinity for a scale of 0."""
    with np.errstate(divide="ignore"):
        return 1 / scale.astype(np.float32)


class FolderForm:
    """The methods of ``Ternary`` for the arrays of a checkpoint."""

    shape: tuple[int, ...]
    dtype: Any
    scale: Any
    planes: Any
    group: int | None
    activations: str | None
    pack: Any
    unpack: Any

    @check_options
    def state(self, inverse: bool = False) -> dict[str, Any]:
        """Return the arrays of a checkpoint, by the last part of their names.

        With ``inverse``, ``weight_scale`` is the divisor of codes, as in BitNet's BitLinear.

        ``weight`` has the bytes of ``pack("bitnet")``.  If ``weight`` and ``weight_scale`` describe
        the weight completely, they are the two arrays of Hugging Face's BitNet; otherwise
        ``weight_form`` has the other properties as JSON.
        """
        rows, columns = self.shape
        weight = np.frombuffer(self.pack("bitnet"), np.uint8).reshape(-(-rows // 4), columns)
        scale = self.scale.reshape(1) if self.scale.ndim == 0 else self.scale
        stored = _inverse(scale) if inverse else scale
        narrow = stored.astype(self.dtype)
        restored = _inverse(narrow) if inverse else narrow
        like: Any = self.planes
        # what a BitNet layer can store: rows in fours, one scale that its dtype does not change
        standard = rows % 4 == 0 and scale.ndim == 1 and self.activations == "int8"
        if standard and bool((restored == scale).all()):
            return {"weight": to_device_of(weight, like), "weight_scale": narrow}
        facts = {"shape": list(self.shape), "group": self.group, "dtype": self.dtype.name}
        text = json.dumps(facts | {"activations": self.activations}).encode()
        arrays = {"weight": to_device_of(weight, like), "weight_scale": stored}
        return arrays | {"weight_form": to_device_of(np.frombuffer(text, np.uint8), like)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], inverse: bool = False) -> Self:
        """Return the weight from the arrays of ``state``, or from the arrays of a BitNet layer.

        Raises
        ------
        ConfigError
            An array is missing, or its shape, dtype or values do not fit the other arrays.
        RangeError
            A code or a scale is invalid.
        """
        call = "Ternary.from_state"
        parts: Any = [checked_state(call, state).get(name) for name in ("weight", "weight_scale")]
        weight, scale = parts
        arrays = all(hasattr(each, "dtype") for each in (weight, scale))
        if not arrays or getattr(weight, "ndim", 0) != 2:
            names = ", ".join(map(str, state))
            raise ConfigError(f"{call}: weight, a matrix, or weight_scale is missing among {names}")
        facts: dict[str, Any] = {"shape": [weight.shape[0] * 4, weight.shape[1]]}
        facts |= {"group": None, "dtype": scale.dtype.name, "activations": "int8"}
        if "weight_form" in state:
            facts = json_of(call, state, ["weight_form"])
        check_library(f"{call}: weight_scale", scale)
        rows, columns = shape = stored_shape(call, facts)
        array_of(call, state, "weight", (-(-rows // 4), columns), np.uint8)
        array_of(call, state, "weight_scale", tuple(scale.shape), scale.dtype)
        whole = facts.get("group") is None and scale.shape == (1,) and scale.dtype.kind != "O"
        stored = _inverse(to_numpy(scale)) if inverse else to_numpy(scale)
        return cls.unpack(
            to_numpy(weight),
            "bitnet",
            shape,
            scale=stored.reshape(()) if whole else stored,
            dtype=facts.get("dtype"),
            like=weight,
            group=facts.get("group"),
            activations=facts.get("activations"),
        )

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint with such weights."""
        return {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "use_rms_norm": False,
        }
