"""The supported model types, each with the properties of its family."""

from collections.abc import Mapping

from .dense_families import DENSE
from .encoder_families import ENCODERS
from .family import Family
from .hybrid_families import HYBRIDS
from .mixture_families import MIXTURES

__all__ = ["ENCODERS", "FAMILIES"]
FAMILIES: Mapping[str, Family] = {**DENSE, **MIXTURES, **HYBRIDS}
