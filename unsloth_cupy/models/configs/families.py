"""The supported model types, each with the properties of its family."""

from collections.abc import Mapping

from .dense_families import DENSE
from .family import Family
from .hybrid_families import HYBRIDS
from .mixture_families import MIXTURES

FAMILIES: Mapping[str, Family] = {**DENSE, **MIXTURES, **HYBRIDS}
