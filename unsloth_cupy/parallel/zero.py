"""ZeRO-1: ranks divide the optimizer's states, and each updates its part of the parameters.

    bytes of states in a rank = bytes of all states / ranks

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Unwritten, empty
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
    """Parameters that are equal in the ranks of a communicator, and the pieces of each rank."""

    comm: Communicator
    names: Collection[str]
    pieces: list[list[Piece]]


class Zero1:
    """``AdamW`` whose moments and master weights are divided among ranks.

    Parameters are equal in all ranks after a step.  If the gradients equal those of one device, so
    do the parameters, even with 8-bit moments, because parts are whole quantization blocks.  The
    result of ``state`` does not depend on the number of ranks.

    Parameters
    ----------
    optimizer : AdamW
        Its state moves to this object, which replaces it.  If it has copies of parameters in
        another dtype, this rank stores only its part of the master weights.
    comm : Communicator
        Ranks that have equal parameters.
    apart : (callable, Communicator), optional
        For experts that ranks divide: a function from a parameter's name to whether it is equal in
        some ranks only, and the communicator of these ranks.

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
            cure = "ranks divide the moments of AdamW only: pass an AdamW"
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
        own_names = self.inner.parameters.keys()
        self.inner.groups = [  # all groups, even if this rank has no part of some of them
            group | {"names": [name for name in group["names"] if name in own_names]}
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
        """The elements of each parameter that this rank updates; absent names: none."""
        return dict(piece for each in self.shared for piece in each.pieces[each.comm.rank])

    @property
    def steps(self) -> int:
        """The number of steps that were not skipped; reading it makes the host wait for the GPU."""
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
        gradients : dict of str to array
            The result of ``sums``; or whole gradients of all parameters, summed over ranks, as
            from ``DataParallel``.
        lr, finite, factor
            As in ``AdamW.step``, equal in all ranks.

        Raises
        ------
        ConfigError, ShapeError, DTypeError, FrameworkError
            As in ``AdamW.step``; nothing has changed then.
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
        """Return this rank's parts of gradients that are summed over ranks.

        The parts have the same bits as the sums of ``DataParallel``; ranks send half as many bytes.

        Raises
        ------
        ConfigError, ShapeError
            gradients does not have one gradient for every parameter, or a shape is wrong.
        """
        self._check_all("Zero1.sums", gradients)
        own = self.own
        sums = {n: empty((length(w),), gradients[n].dtype, gradients[n]) for n, w in own.items()}
        for comm, shared_names, every in self.shared:
            for names in by_dtype({name: gradients[name] for name in shared_names}):
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

        The gradients of all experts count, including those of other ranks.
        """
        return measured_parts(
            parts, {}, next(iter(self.live.values())), self.comm, max_norm, scaler
        )

    def masters(self) -> dict[str, Any]:
        """Return all parameters in the precision of the optimizer: new arrays, equal in all ranks.

        A checkpoint should contain them in addition to ``state``.
        """
        return {name: each.read() for name, each in self.unwritten_masters().items()}

    def unwritten_masters(self) -> dict[str, Unwritten]:
        """Return the arrays of ``masters``, which all ranks gather one by one, in this order."""
        parts = self.inner.parameters
        return {
            name: Unwritten(self.dtypes[name], shape, partial(self._whole, name, parts))
            for name, shape in self.shapes.items()
        }

    def gathered(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole arrays of parts of parameters, or of gradients in the same dtype."""
        return {name: self._whole(name, parts) for name in self.shapes}

    def _check_all(self, call: str, gradients: Mapping[str, Any]) -> None:
        """Raise unless there is one gradient for every parameter, with its shape."""
        check_mapping(call, gradients)
        if gradients.keys() != self.shapes.keys():
            missing = sorted(self.shapes.keys() ^ gradients.keys())
            cure = "pass one gradient for every parameter, by its name"
            raise ConfigError(f"{call}: names differ in {missing}; {cure}")
        for name, shape in self.shapes.items():
            _check(f"{call}: gradient of {name}", gradients[name], shape)

    def state(self) -> dict[str, Any]:
        """Return the same state as ``AdamW.state`` in one process: whole arrays, in all ranks."""
        arrays = self.unwritten_state().items()
        return self.numbers() | {name: each.read() for name, each in arrays}

    def unwritten_state(self) -> dict[str, Unwritten]:
        """Return the arrays of ``state``, which all ranks gather one by one, in this order."""
        arrays = {}
        for field in STATES:
            for name, shape in self.shapes.items():
                if not field.endswith("scale") or name in self.narrow:
                    size = (-(-math.prod(shape) // BLOCK),) if field.endswith("scale") else shape
                    read = partial(self._whole, name, self._states(field), field)
                    arrays[f"{field}.{name}"] = Unwritten(self._dtype(name, field), size, read)
        return arrays

    def numbers(self) -> dict[str, Any]:
        """Return the part of ``state`` that is equal in all ranks: steps, and rates of groups."""
        return {n: a for n, a in self.inner.state().items() if n in ("steps", "groups")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from ``state``, of any number of ranks, or from ``AdamW.state``.

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
            cure = "pass the result of state() for the same parameters"
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
        """Return the part of a parameter to update; a new array if the model uses a copy."""
        part = self._part(tensor.parameter, where)
        return part if tensor.copy is None else part.copy()

    def _part(self, array: Any, where: slice) -> Any:
        """Return a view of elements of an array in C order."""
        return array.reshape(-1)[where]

    def _states(self, field: str) -> dict[str, Any]:
        """Return this rank's parts of an optimizer state, by parameter."""
        return {name: getattr(tensor, field) for name, tensor in self.inner.tensors.items()}

    def _whole(self, name: str, own: Mapping[str, Any], field: str = "") -> Any:
        """Return the whole array from the parts of all ranks; a rank may have no part."""
        part = own.get(name)
        if part is None:
            part = self._empty_part(name, field)
        whole = next(each.comm for each in self.shared if name in each.names).all_gather(part)
        return whole if field.endswith("scale") else whole.reshape(self.shapes[name])

    def _empty_part(self, name: str, field: str) -> Any:
        """Return an empty array in the dtype of other ranks' parts, for a rank without elements."""
        return empty((0,), self._dtype(name, field), self.live[name])

    def _dtype(self, name: str, field: str) -> Any:
        """Return the dtype of a parameter, or of its optimizer state in a field."""
        if not field:
            return self.dtypes[name]
        codes = name in self.narrow and not field.endswith("scale")
        return np.dtype(np.uint8) if codes else np.promote_types(self.dtypes[name], np.float32)

    def _pass_on(self) -> None:
        """Send the parameters that each rank has updated to all ranks."""
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
    """Return the slice of a state for a slice of elements; scales have one element per block."""
    if not field.endswith("scale"):
        return where
    return slice(where.start // BLOCK, -(-where.stop // BLOCK))


def _check(what: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise ShapeError for an array of another shape; its part alone could have the right size."""
    if tuple(array.shape) != tuple(shape):
        problem = f"{what} has shape {tuple(array.shape)}; it must be {tuple(shape)}"
        raise ShapeError(problem, expected=tuple(shape), actual=tuple(array.shape))
