"""The base class of all optimizers: parameter groups, 16-bit copies, checks, and saved states."""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from ..core.arrays import framework_of
from ..core.call import is_list, is_number
from ..core.dtypes import FLOATS, Array
from ..core.gpu import device_of, several_gpus
from ..errors import ConfigError, DTypeError, FrameworkError, ShapeError
from ..ops.common.many import launchable
from ..ops.common.spans import span
from ..ops.optimizers.host import gradient_dtypes
from ..ops.optimizers.launch import Rates
from ..placement import on_gpu_of_attribute
from .gradients import check_in_place, check_mapping, check_place

RATES = "lr", "weight_decay"  # that a group may have
EXAMPLE = '{"names": ["*norm*", "*.bias"], "weight_decay": 0.0}, with "lr" where it has its own'


@on_gpu_of_attribute("home")
class Optimizer:
    """An optimizer that updates named parameters in place.

    A subclass defines the update rule and the state arrays of a parameter.

    Attributes
    ----------
    groups : list of dict
        Parameter groups, as torch's ``param_groups``: the groups with the names of their
        parameters, then a group with all other parameters.  Changes of ``lr`` and
        ``weight_decay`` in a group apply from the next step on.
    kind : type
        A named tuple of a parameter, its 16-bit copy, and its state arrays.
    numbers : dict of str to float
        Counters that a step changes: the number of steps that were not skipped.  If kernels
        compute the steps, the counters are stored on the GPU.
    """

    kind: ClassVar[Any]
    more: ClassVar[tuple[str, ...]] = ()  # names of numbers besides the steps

    def __init__(
        self,
        parameters: Mapping[str, Array],
        groups: Sequence[Mapping[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        **numbers: float,
    ) -> None:
        self.call = type(self).__name__
        check_rates(self.call, {"lr": lr, "weight_decay": weight_decay, **numbers})
        check_in_place(self.call, parameters)
        self.parameters = dict(parameters)
        self.home = next(iter(self.parameters.values()), None)  # all are on one GPU
        self.lr, self.weight_decay = lr, weight_decay
        self.groups = _groups(self.call, self.parameters, groups)
        self.launchers: list[Any] = []  # of the groups that have parameters, if a kernel steps
        self.numbers: dict[str, float] = {"steps": 0} | dict.fromkeys(self.more, 0.0)
        with device_of(self.home):
            self.tensors = {name: self._tensor(name, p) for name, p in self.parameters.items()}
            self._prepare()

    def _tensor(self, name: str, parameter: Any) -> Any:
        """Return a parameter and its state arrays, as they are before the first step."""
        raise NotImplementedError

    def _launcher(self, tensors: Mapping[str, Any]) -> Any:
        """Return a launcher that updates these tensors in one launch; None: NumPy or CuPy does."""

    def _begin(self, rate: float) -> dict[str, Any]:
        """Return the options of ``_update`` that all parameters share in a step."""
        return {}

    def _update(self, name: str, gradient: Any, **options: Any) -> None:
        """Update one parameter; options are lr, weight_decay, factor and the options of _begin."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """The number of steps that were not skipped; reading it waits for a GPU."""
        return int(self._numbers()["steps"])

    def _numbers(self) -> dict[str, float]:
        """Return the counters; reading them waits for a GPU."""
        return self.launchers[0].numbers() if self.launchers else self.numbers

    def _prepare(self) -> None:
        arrays = [a for t in self.tensors.values() for a in (t.parameter, t.copy) if a is not None]
        groups = self._names() if launchable(arrays) else []
        launchers = (
            self._launcher({name: self.tensors[name] for name in names}) for names in groups
        )
        self.launchers = [launcher for launcher in launchers if launcher is not None]

    def _names(self) -> list[list[str]]:
        """Return the parameter names of each group that is not empty."""
        return [group["names"] for group in self.groups if group["names"]]

    def keep_copies(self, copies: Mapping[str, Array]) -> None:
        """Write the rounded parameters to 16-bit arrays, now and in every step.

        The float32 parameters are then the master weights of a model that computes in 16 bits with
        the copies; gradients may have the dtype of the copies.

        Parameters
        ----------
        copies : {name: array}
            float16 or bfloat16 arrays, writable, with the shapes of the parameters.  Other
            parameters have no copy.

        Raises
        ------
        ConfigError
            A name is unknown, or an array is read-only.
        ShapeError, DTypeError, FrameworkError
            A copy does not fit its parameter, or the parameter is not float32.
        """
        check_in_place(f"{self.call}.keep_copies", copies)
        if unknown := sorted(copies.keys() - self.parameters.keys()):
            problem = f"{self.call}.keep_copies: unknown {unknown}"
            raise ConfigError(f"{problem}; pass names of parameters")
        changed = {f"the copy of {name}": copy for name, copy in copies.items()} | self.parameters
        check_in_place(f"{self.call}.keep_copies", changed)
        for name, copy in copies.items():
            what, parameter = f"{self.call}.keep_copies: {name}", self.parameters[name]
            _check(what, copy, parameter, FLOATS[:2])
            _check(f"{what}'s parameter", parameter, copy, FLOATS[2:3])
        for name, copy in copies.items():
            self.tensors[name] = self.tensors[name]._replace(copy=copy)
            with np.errstate(over="ignore"):  # float16 overflow gives inf, as on a GPU
                copy[...] = self.parameters[name]
        if self.launchers and launchable(list(copies.values())):
            for launcher in self.launchers:
                launcher.replace(self.tensors)
        else:
            self.numbers = self._numbers()
            self._prepare()

    def step(
        self,
        gradients: Mapping[str, Array],
        lr: float | None = None,
        *,
        finite: Any = True,
        factor: Any = 1.0,
    ) -> None:
        """Update every parameter in place.

        Parameters
        ----------
        gradients : {name: array}
            One gradient per parameter, in the shape of the parameter, and in its dtype, the dtype
            of its copy, or float32.
        lr : float, optional
            Learning rate of this step, from a schedule.  The rates of groups are scaled by the same
            factor.
        finite : bool, or bool array of shape ()
            False: skip the step, and change nothing.
        factor : float, or float32 array of shape ()
            Factor that multiplies the gradients: 1 / loss scale, or less to clip the gradients.
            ``measure_gradients`` returns ``finite`` and ``factor``, on a GPU as arrays that the
            host never reads.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or lr is negative or not finite.
        ShapeError, DTypeError, FrameworkError
            A gradient does not fit its parameter.  The parameters are then unchanged.
        """
        rate = self.check(gradients, lr, finite=finite, factor=factor)
        rates = [self._rates(group, rate) for group in self.groups if group["names"]]
        ordered = [[gradients[name] for name in names] for names in self._names()]
        with span(f"{self.call}.step", self.home, lambda: self.traffic(gradients)):
            if self.launchers:
                for launcher, own, options in zip(self.launchers, ordered, rates, strict=True):
                    launcher(own, Rates(**options, of_step=rate), finite=finite, factor=factor)
            elif finite:
                self.numbers["steps"] += 1
                shared = {**self._begin(rate), "factor": float(factor)}
                for names, own, options in zip(self._names(), ordered, rates, strict=True):
                    for name, gradient in zip(names, own, strict=True):
                        self._update(name, gradient, **options, **shared)

    def check(
        self, gradients: Mapping[str, Array], lr: float | None, *, finite: Any, factor: Any
    ) -> float:
        """Return the learning rate of a step; raise the errors of ``step`` for its arguments."""
        rate, call = self.lr if lr is None else lr, f"{self.call}.step"
        if not is_number(rate) or not 0 <= rate < math.inf:
            raise ConfigError(f"{call}: lr={rate}; pass a finite number, 0 or more")
        kind = getattr(getattr(factor, "dtype", None), "kind", "O")
        if not is_number(factor) and not (kind in "iuf" and factor.shape == ()):
            raise ConfigError(f"{call}: factor={factor!r}; pass a number, or one in an array")
        if getattr(finite, "shape", ()) != ():
            raise ConfigError(f"{call}: finite={finite!r}; pass True or False for all of them")
        check_names(call, gradients, self.parameters)
        for name, tensor in self.tensors.items():
            what = f"{call}: gradient of {name}"
            _check(what, gradients[name], tensor.parameter, gradient_dtypes(tensor))
        return rate

    def _rates(self, group: Mapping[str, Any], rate: float) -> dict[str, Any]:
        """Return the learning rate and the weight decay of a group in a step."""
        own = {key: group.get(key, getattr(self, key)) for key in RATES}
        check_rates(f"{self.call}.step: groups", own)
        if "lr" not in group:
            return own | {"lr": rate}
        return own | {"lr": own["lr"] * (rate / self.lr) if self.lr else own["lr"]}

    def traffic(self, gradients: Mapping[str, Array]) -> int:
        """Return the bytes that a step reads and writes.

        Gradients are read, copies are written, all other arrays are read and written.
        """
        held = (each for tensor in self.tensors.values() for each in tensor if each is not None)
        copies = sum(t.copy.nbytes for t in self.tensors.values() if t.copy is not None)
        return (
            2 * sum(array.nbytes for array in held)
            - copies
            + sum(gradients[name].nbytes for name in self.parameters)
        )

    def state(self) -> dict[str, Array]:
        """Return the arrays to save in a checkpoint with the parameters, for ``load_state``.

        ``steps`` is a NumPy integer array of shape ().  The arrays of a parameter, such as
        ``mean.<name>``, are not copies: save or copy them before the next step changes them.  With
        groups, ``groups`` is an array with a row (lr, weight_decay) per group, NaN where a group
        uses the default; the last row is the group of all other parameters.
        """
        rates = np.array([[group.get(key, math.nan) for key in RATES] for group in self.groups])
        groups = {"groups": rates} if len(rates) > 1 or not np.isnan(rates).all() else {}
        return {**{n: np.array(v) for n, v in self._numbers().items()}, **groups, **self._states()}

    def _states(self) -> dict[str, Any]:
        return {
            f"{field}.{name}": getattr(tensor, field)
            for field in self.kind._fields[2:]
            for name, tensor in self.tensors.items()
            if getattr(tensor, field) is not None
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state()``; later steps have the same bits as without the interruption.

        If the state has group rates, they replace the rates of the groups.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or steps is not an integer of 0 or more.
        ShapeError, DTypeError, FrameworkError
            An array does not fit its parameter.  Nothing has been changed then.
        """
        check_mapping(f"{self.call}.load_state", state)
        own = self._states()
        numbers = {name: np.asarray(state.get(name)) for name in self.numbers}
        names = own.keys() | numbers.keys()
        wide = state.get("groups")
        shape = len(self.groups), len(RATES)
        rates = np.full(shape, math.nan) if wide is None else np.asarray(wide)
        names |= {"groups"} if wide is not None else set()
        if rates.shape != shape:
            raise ShapeError(
                f"{self.call}.load_state: groups has shape {rates.shape}; this optimizer has"
                f" {shape[0]} groups, with that of all other parameters",
                expected=shape,
                actual=rates.shape,
            )
        if rates.dtype.kind != "f" or (rates < 0).any() or np.isinf(rates).any():
            problem = f"{self.call}.load_state: groups holds {rates.tolist()}"
            raise ConfigError(f"{problem}; pass finite rates of 0 or more, NaN for none")
        steps = numbers["steps"]
        fits = steps.dtype.kind in "iu" and all(
            not n.shape and n.dtype.kind in "iuf" and 0 <= n < math.inf for n in numbers.values()
        )
        if state.keys() != names or not fits:
            different = sorted(map(str, state.keys() ^ names))
            counters = ", ".join(f"{name} is {number}" for name, number in numbers.items())
            raise ConfigError(
                f"{self.call}.load_state: names differ in {different}, {counters};"
                " pass what state() returned for the same parameters"
            )
        check_states(self.call, own, state)
        for name, array in own.items():
            array[...] = state[name]
        for group, own_rates in zip(self.groups, rates.tolist(), strict=True):
            for key, rate in zip(RATES, own_rates, strict=True):
                if wide is None:
                    continue
                group.pop(key, None)
                if not math.isnan(rate):
                    group[key] = rate
        self.numbers = {name: number.item() for name, number in numbers.items()}
        self._prepare()


def _groups(
    call: str, parameters: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups with the names of their parameters, then a group of all other parameters."""
    result, rest = list[dict[str, Any]](), dict.fromkeys(parameters)
    every: Any = groups
    if not isinstance(every, list | tuple):
        raise ConfigError(f"{call}(groups={groups!s:.80}): pass a list of {EXAMPLE}")
    for group in every:
        what = f"{call}(groups=[..., {group!s:.80}])"
        if not isinstance(group, Mapping) or not {"names"} <= group.keys() <= {"names", *RATES}:
            raise ConfigError(f"{what}: pass a group as {EXAMPLE}")
        check_rates(what, group)
        own = matching(what, group["names"], parameters)
        if twice := [name for name in own if name not in rest]:
            raise ConfigError(f"{what}: {twice[0]} is in another group too; name it in one of them")
        for name in own:
            del rest[name]
        result.append({**group, "names": [*own]})
    return [*result, {"names": [*rest]}]


def matching(what: str, patterns: Any, parameters: Collection[str]) -> dict[str, None]:
    """Return the parameters that names or patterns match; raise if one matches none."""
    names = [patterns] if isinstance(patterns, str) else patterns
    if not (is_list(names) and all(isinstance(n, str) for n in names)):
        raise ConfigError(f"{what}: pass names of parameters, or patterns such as '*norm*'")
    own: dict[str, None] = {}
    for pattern in names:
        matches = [pattern] if pattern in parameters else []
        matches = matches or [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            some = ", ".join(list(parameters)[:3])
            raise ConfigError(f"{what}: no parameter is named {pattern!r}; names look like {some}")
        own |= dict.fromkeys(matches)
    return own


def check_states(call: str, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise unless a state has an array for each state array of an optimizer, like it."""
    if missing := sorted(own.keys() - state.keys()):
        cure = "pass what state() returned for the same parameters"
        raise ConfigError(f"{call}.load_state: names differ in {missing}; {cure}")
    for name, array in own.items():
        _check(f"{call}.load_state: {name}", state[name], array, (array.dtype,))


def check_names(call: str, gradients: Mapping[str, Array], parameters: Mapping[str, Array]) -> None:
    """Raise unless there is one gradient for every parameter."""
    check_mapping(call, gradients)
    if gradients.keys() != parameters.keys():
        missing = sorted(parameters.keys() - gradients.keys())
        unknown = sorted(map(str, gradients.keys() - parameters.keys()))
        raise ConfigError(
            f"{call}: missing {missing}, unknown {unknown};"
            " pass one gradient for every parameter, by its name"
        )


def checked_betas(call: str, betas: Any) -> tuple[float, float]:
    """Return the decay rates of the two moments; raise unless they are two numbers in [0, 1)."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2 and all(map(is_number, betas))
    if not pair or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{call}: betas={betas}; pass two numbers, each from 0 to below 1")
    return float(betas[0]), float(betas[1])


def check_rates(call: str, options: Mapping[str, Any]) -> None:
    """Raise unless all options other than ``names`` are finite numbers of 0 or more."""
    for option, value in options.items():
        if option != "names" and (not is_number(value) or not 0 <= value < math.inf):
            raise ConfigError(f"{call}: {option}={value}; pass a finite number, 0 or more")


def _check(what: str, array: Array, model: Array, dtypes: Sequence[Any]) -> None:
    """Raise unless an array has the library and shape of ``model`` and one of the dtypes."""
    place, model_place = (framework_of(a, what) for a in (array, model))
    if several_gpus() and place == model_place == "cupy":
        place, model_place = (f"cupy {a.device}" for a in (array, model))
    if place != model_place:
        raise FrameworkError(f"{what} comes from {place}; it must come from {model_place}")
    if array.shape != model.shape:
        problem = f"{what} has shape {array.shape}; it must be {model.shape}"
        raise ShapeError(problem, expected=tuple(model.shape), actual=tuple(array.shape))
    if array.dtype not in dtypes:
        cure = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise DTypeError(f"{what} is {array.dtype}; it must be {cure}")
    check_place(what, array)
