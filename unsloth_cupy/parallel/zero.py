"""ZeRO-1: ranks divide the optimizer's states, and each updates its part of the parameters.

    bytes of states in a rank = bytes of all states / ranks

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty
from ..errors import ConfigError, ShapeError
from ..ops.common.dynamic_codes import BLOCK
from ..ops.optimizers.gradients import GradientMeasure
from ..training.adamw import AdamW
from ..training.averages import own_form
from ..training.gradients import check_mapping
from ._pieces import Piece, divided, length, turns
from ._shards import by_dtype, measured_parts
from .communicator import Communicator, check_communicator
from .exchanges import raw

STATES = ("mean", "square", "mean_scale", "square_scale")


class Shared(NamedTuple):
    """Parameters that the ranks of a communicator hold equal, and the pieces of each rank."""

    comm: Communicator
    names: Collection[str]
    pieces: list[list[Piece]]


class Zero1:
    """``AdamW`` whose moving averages, and master weights, are divided among ranks.

    Parameters are equal in all ranks after a step.  They equal those of one device if the gradients
    do, also with 8-bit averages, because parts are whole quantization blocks.  The result of
    ``state`` does not depend on the number of ranks.

    Parameters
    ----------
    optimizer : AdamW
        Its state moves to this object: call this one from now on.  If it keeps copies in another
        dtype, this rank keeps only its part of the master weights.
    comm : Communicator
        Of ranks that have equal parameters.
    apart : (callable, Communicator), optional
        Whether a parameter, by its name, is equal only in some of those ranks, and these: experts
        that ranks divide.

    Raises
    ------
    ConfigError
        A parameter is not in C order.
    """

    def __init__(
        self,
        optimizer: Any,
        comm: Communicator,
        apart: tuple[Callable[[str], bool], Communicator] | None = None,
    ) -> None:
        check_communicator("Zero1", comm)
        if not isinstance(optimizer, AdamW):
            cure = "ranks divide the averages of AdamW alone: pass an AdamW"
            raise ConfigError(f"Zero1: {reprlib.repr(optimizer)}; {cure}")
        self.comm, self.call = comm, optimizer.call
        tensors = optimizer.tensors
        for name, tensor in tensors.items():
            if not tensor.parameter.flags.c_contiguous:
                cure = "pass AdamW a copy of it"
                raise ConfigError(f"Zero1: {name} is not in C order; {cure}")
        self.shapes = {name: tensor.parameter.shape for name, tensor in tensors.items()}
        sizes = {name: tensor.parameter.size for name, tensor in tensors.items()}
        is_apart, few = (lambda name: False, comm) if apart is None else apart
        self.shared = []
        for group, has in ((comm, False), (few, True)):
            own_sizes = {name: size for name, size in sizes.items() if is_apart(name) is has}
            self.shared.append(Shared(group, own_sizes, divided(own_sizes, group.size)))
        self.narrow = {name for name, tensor in tensors.items() if tensor.mean_scale is not None}
        self.dtypes = {name: tensor.parameter.dtype for name, tensor in tensors.items()}
        self.live = {n: t.parameter if t.copy is None else t.copy for n, t in tensors.items()}
        own = self.own
        self.inner = AdamW(
            {name: self._master(tensors[name], where) for name, where in own.items()},
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            state_bits=8 if self.narrow else 32,
            whole=own.keys() - self.narrow,
        )
        held = self.inner.parameters.keys()
        self.inner.groups = [  # the same in all ranks, also where a rank has no part of a group
            group | {"names": [name for name in group["names"] if name in held]}
            for group in optimizer.groups
        ]
        copies = {n: where for n, where in own.items() if tensors[n].copy is not None}
        if copies:
            self.inner.keep_copies({n: self._part(self.live[n], at) for n, at in copies.items()})
        self.load_state(optimizer.state())
        optimizer.tensors, optimizer.launchers, optimizer.groups = {}, [], [{"names": []}]
        optimizer.parameters, optimizer.home = {}, None

    @property
    def own(self) -> dict[str, slice]:
        """Which elements of each parameter this rank updates; one that it does not is absent."""
        return dict(piece for each in self.shared for piece in each.pieces[each.comm.rank])

    @property
    def steps(self) -> int:
        """The number of steps that were not skipped; reading it waits for a GPU."""
        return self.inner.steps

    def step(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        finite: Any = True,
        factor: Any = 1.0,
    ) -> None:
        """Update the parameters of all ranks, as ``AdamW.step`` does.

        Parameters
        ----------
        gradients : {name: array}
            What ``sums`` returns; or whole gradients of all parameters, summed over ranks, as
            ``DataParallel`` returns them.
        lr, finite, factor
            As in ``AdamW.step``, equal in all ranks.

        Raises
        ------
        ConfigError, ShapeError, DTypeError, FrameworkError
            As ``AdamW.step`` raises; nothing has changed then.
        """
        check_mapping("Zero1.step", gradients)
        own = self.own
        lengths = {name: (length(where),) for name, where in own.items()}
        parts = gradients
        if lengths != {name: tuple(array.shape) for name, array in gradients.items()}:
            self._check_all("Zero1.step", gradients)
            parts = {name: self._part(gradients[name], where) for name, where in own.items()}
        self.inner.step(parts, lr, finite=finite, factor=factor)
        self._pass_on()

    def sums(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of the sums over ranks of gradients.

        They have the same bits as the sums of ``DataParallel``, and send half as many bytes.

        Raises
        ------
        ConfigError, ShapeError
            Gradients are not those of all parameters.
        """
        self._check_all("Zero1.sums", gradients)
        own = self.own
        sums = {n: empty((length(w),), gradients[n].dtype, gradients[n]) for n, w in own.items()}
        for comm, held, every in self.shared:
            for names in by_dtype({name: gradients[name] for name in held}):
                group = [[piece for piece in pieces if piece.name in names] for pieces in every]
                for turn in turns(group, gradients):
                    part = comm.reduce_scatter(self._rows(turn, gradients))[0]
                    start = 0
                    for name, where in turn[comm.rank]:
                        stop, begin = start + length(where), own[name].start
                        sums[name][where.start - begin : where.stop - begin] = part[start:stop]
                        start = stop
        return sums

    def _rows(self, turn: list[list[Piece]], arrays: Mapping[str, Any]) -> Any:
        """Return a matrix whose rows are the concatenated pieces of each rank, padded with 0."""
        like = next(arrays[piece.name] for pieces in turn for piece in pieces)
        longest = max(sum(length(piece.where) for piece in pieces) for pieces in turn)
        rows = empty((len(turn), longest), like.dtype, like)
        rows[...] = 0
        for row, pieces in enumerate(turn):
            start = 0
            for name, where in pieces:
                rows[row, start : start + length(where)] = self._part(arrays[name], where)
                start += length(where)
        return rows

    def measure_gradients(
        self, parts: Mapping[str, Any], max_norm: float = math.inf, *, scaler: Any = None
    ) -> GradientMeasure:
        """Return ``measure_gradients`` of the whole gradients from parts, equal in all ranks.

        Those of all experts count, which a rank holds some of.
        """
        return measured_parts(
            parts, {}, next(iter(self.live.values())), self.comm, max_norm, scaler
        )

    def masters(self) -> dict[str, Any]:
        """Return all parameters in the precision of steps: new arrays, equal in all ranks.

        A checkpoint should contain them besides ``state``.
        """
        return self.gathered(self.inner.parameters)

    def gathered(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole arrays of parts of parameters, or of gradients in the same dtype."""
        return {name: self._whole(name, parts) for name in self.shapes}

    def _check_all(self, call: str, gradients: Mapping[str, Any]) -> None:
        """Raise unless gradients are those of all parameters."""
        check_mapping(call, gradients)
        if gradients.keys() != self.shapes.keys():
            missing = sorted(self.shapes.keys() ^ gradients.keys())
            cure = "pass one gradient for every parameter, by its name"
            raise ConfigError(f"{call}: names differ in {missing}; {cure}")
        for name, shape in self.shapes.items():
            _check(f"{call}: gradient of {name}", gradients[name], shape)

    def state(self) -> dict[str, Any]:
        """Return what ``AdamW.state`` returns in one process: whole arrays, equal in all ranks."""
        state = {n: a for n, a in self.inner.state().items() if n in ("steps", "groups")}
        for field in STATES:
            for name in self.shapes:
                if not field.endswith("scale") or name in self.narrow:
                    state[f"{field}.{name}"] = self._whole(name, self._states(field), field)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned, with any number of ranks, or what ``AdamW.state`` did.

        Raises
        ------
        ConfigError
            A name is missing or unknown.
        ShapeError, DTypeError, FrameworkError
            An array does not fit its parameter; nothing has changed then.
        """
        check_mapping("Zero1.load_state", state)
        state = own_form(state, self.shapes, self.narrow)
        narrow = {f"{f}.{n}" for f in STATES for n in self.narrow}
        names = {f"{f}.{n}" for f in STATES[:2] for n in self.shapes} | narrow | {"steps"}
        if state.keys() - {"groups"} != names:
            different = sorted((state.keys() - {"groups"}) ^ names)
            cure = "pass what state() returned for the same parameters"
            raise ConfigError(f"Zero1.load_state: names differ in {different}; {cure}")
        for name, shape in self.shapes.items():
            for field in STATES[:2]:
                _check(f"Zero1.load_state: {field}.{name}", state[f"{field}.{name}"], shape)
        own: dict[str, Any] = {n: state[n] for n in ("steps", "groups") if n in state}
        for name, where in self.own.items():
            for field in STATES:
                key = f"{field}.{name}"
                if key in state:
                    own[key] = self._part(state[key], _scaled(field, where))
        self.inner.load_state(own)

    def _master(self, tensor: Any, where: slice) -> Any:
        """Return a part of a parameter to update: a new array if the model computes with a copy."""
        part = self._part(tensor.parameter, where)
        return part if tensor.copy is None else part.copy()

    def _part(self, array: Any, where: slice) -> Any:
        """Return a view of elements of an array in C order."""
        return array.reshape(-1)[where]

    def _states(self, field: str) -> dict[str, Any]:
        """Return this rank's parts of an optimizer state, by parameter."""
        return {name: getattr(tensor, field) for name, tensor in self.inner.tensors.items()}

    def _whole(self, name: str, own: Mapping[str, Any], field: str = "") -> Any:
        """Return the whole array of which each rank has a part, or nothing."""
        part = own.get(name)
        if part is None:
            part = self._empty_part(name, field)
        whole = next(each.comm for each in self.shared if name in each.names).all_gather(part)
        return whole if field.endswith("scale") else whole.reshape(self.shapes[name])

    def _empty_part(self, name: str, field: str) -> Any:
        """Return the empty part of a rank without elements, in the dtype of the others' parts."""
        dtype = self.dtypes[name]
        if field:
            codes = name in self.narrow and not field.endswith("scale")
            dtype = np.dtype(np.uint8) if codes else np.promote_types(dtype, np.float32)
        return empty((0,), dtype, self.live[name])

    def _pass_on(self) -> None:
        """Copy the parameters that each rank has updated to all ranks."""
        like = next(iter(self.live.values()))
        for comm, _, pieces in self.shared:
            for turn in turns(pieces, self.live):
                parts = [raw(self._part(self.live[p.name], p.where)) for p in turn[comm.rank]]
                whole = comm.all_gather(np.concatenate([empty((0,), np.uint8, like), *parts]))
                start = 0
                for piece in (piece for chunk in turn for piece in chunk):
                    part = raw(self._part(self.live[piece.name], piece.where))
                    part[...] = whole[start : start + part.size]
                    start += part.size


def _scaled(field: str, where: slice) -> slice:
    """Return the slice of a state for a slice of elements: that of blocks for scales."""
    if not field.endswith("scale"):
        return where
    return slice(where.start // BLOCK, -(-where.stop // BLOCK))


def _check(what: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise ShapeError for an array of another shape, which the rank's part might not reveal."""
    if tuple(array.shape) != tuple(shape):
        problem = f"{what} has shape {tuple(array.shape)}; it must be {tuple(shape)}"
        raise ShapeError(problem, expected=tuple(shape), actual=tuple(array.shape))
