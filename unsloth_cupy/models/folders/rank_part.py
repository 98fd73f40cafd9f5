"""The part of each parameter that this process holds: its slices, quantized, on its device.

``load`` and ``create`` pass every parameter through ``RankPart``: only it cuts, quantizes and moves
parameters to a device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.call import is_integer
from ...core.dtypes import Array
from ...errors import ConfigError
from ...ops.quantized.weight import Quantized
from ...parallel.communicator import Communicator, SingleCommunicator, check_communicator
from ...parallel.zero3 import Parts
from ..configs.config import Config
from ..configs.heads import CAUSAL
from ..quantizer import Quantizer
from ..ranks.division import Division
from ..ranks.pipeline_stages import Stages
from .joined import Joined
from .lazy_parameter import LazyParameter


class RankPart:
    """The part of each parameter that this process holds.

    Attributes
    ----------
    place : callable
        Copies an array to the device.
    division : Division or None
        The slices that tensor, pipeline and expert parallelism give to this rank.
    parts : Parts or None
        The flat parts that ``parallel.Zero3`` gives to this rank.
    quantizer : Quantizer or None
        Quantizes weights when they are read.
    """

    def __init__(
        self,
        config: Config,
        place: Callable[[Any], Any],
        division: Division | None,
        parts: Communicator | None,
        quantizer: Quantizer | None = None,
    ) -> None:
        self.place, self.division, self.quantizer = place, division, quantizer
        self.parts = None if parts is None else Parts(parts)
        self.joined = Joined(config, division)

    def holds(self, name: str) -> bool:
        """Return whether this rank holds a part of a parameter."""
        return self.division is None or self.division.holds(name)

    def read(self, name: str, unread: LazyParameter) -> Any:
        """Return this rank's part of a parameter in a file, and read only what the part needs."""
        division, parts, shape = self.division, self.parts, unread.home.shape
        dense = unread.home.kind is None
        if (
            parts is not None
            and dense
            and not (self.quantizer and self.quantizer.makes(name, shape))
        ):
            if division is None:
                return self.place(parts.read(name, shape, unread.__getitem__))
            rows = partial(division.own, name, unread)
            return self.place(parts.read(name, division.shape(name), rows))
        if parts is not None and division is None and (rows_of := self._by_rows(unread)):
            return parts.read_quantized(shape, *rows_of)
        if division is None or (self.quantizer is not None and self.quantizer.wants_whole(name)):
            value = unread.whole()
        else:
            value = division.own(name, unread)
        placed = value.moved(self.place) if isinstance(value, Quantized) else self.place(value)
        return self._held(name, placed if self.quantizer is None else self.quantizer(name, placed))

    def draw(self, name: str, array: Array) -> Any:
        """Return this rank's part of a new parameter, which is not quantized."""
        return self._held(
            name, self.place(array if self.division is None else self.division.own(name, array))
        )

    def _held(self, name: str, value: Any) -> Any:
        """Return a value as rows of its group's matrix, or this rank's flat part for ZeRO-3."""
        return self.joined(name, value) if self.parts is None else self.parts.keep(name, value)

    def _by_rows(self, unread: LazyParameter) -> tuple[int, Callable[[slice], Quantized]] | None:
        """Return (step, read): ``read(rows)`` returns rows of a quantized weight.

        Rows from a multiple of ``step`` on are equal to the same rows of the whole weight.  None:
        the codes of a row depend on other rows, or rows cannot be read separately.
        """
        home, place = unread.home, self.place
        if home.kind is None and self.quantizer is not None:
            return self.quantizer.by_rows(unread.name, home.shape, lambda rows: place(unread[rows]))
        step = None if home.kind is None or self.quantizer is not None else unread.step()
        return None if step is None else (step, lambda rows: unread.rows(rows).moved(place))


def division_of(
    call: str,
    config: Config,
    dtype: Any,
    communicator: Communicator | None,
    pipeline: Communicator | None,
    chunks: int,
    experts: Communicator | None,
) -> Division | None:
    """Return how ranks divide a model; None if this process holds the whole model."""
    communicators = {"communicator": communicator, "pipeline": pipeline, "experts": experts}
    communicators = {name: comm for name, comm in communicators.items() if comm is not None}
    if not is_integer(chunks, 1):
        raise ConfigError(f"{call}(chunks={chunks!r}): pass an integer, 1 or more")
    if chunks > 1 and pipeline is None:
        problem = "chunks divide the blocks of a pipeline's rank"
        raise ConfigError(f"{call}(chunks={chunks}): {problem}; pass pipeline= too")
    if not communicators:
        return None
    if experts is not None and config.head != CAUSAL:
        problem = f"the head is {config.head!r}, and expert parallelism needs a language model"
        raise ConfigError(f"{call}(experts=): {problem}; divide tensors, blocks or the batch")
    for name, comm in communicators.items():
        check_communicator(f"{call}({name}=)", comm)
    stages = None if pipeline is None else Stages(config, pipeline, chunks)
    if stages is not None:
        stages.dtype = dtype
    return Division(config, communicator or SingleCommunicator(), stages, experts)
