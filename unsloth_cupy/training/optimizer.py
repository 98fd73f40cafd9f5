"""Adam with decoupled weight decay over named parameters."""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..core.arrays import framework_of
from ..core.call import check_options, is_number
from ..core.dtypes import FLOATS, Array, allowed
from ..core.gpu import device_of, several_gpus
from ..errors import ConfigError, DTypeError, FrameworkError, ShapeError
from ..ops.common.dynamic_codes import BLOCK
from ..ops.common.many import launchable
from ..ops.common.spans import span
from ..ops.optimizers.adamw_step import Launcher, Tensor, host_step
from ..placement import on_gpu_of_attribute
from .gradients import check_in_place, check_mapping, check_place

RATES = "lr", "weight_decay"  # that a group may have
EXAMPLE = '{"names": ["*norm*", "*.bias"], "weight_decay": 0.0}, with "lr" where it has its own'
SMALL = 4096  # elements; smaller parameters have float32 averages, as in bitsandbytes


@on_gpu_of_attribute("home")
@check_options
class AdamW:
    """Adam with decoupled weight decay; the formula is in ``ops/optimizers/adamw.py``.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    Parameters
    ----------
    parameters : {name: array}
        NumPy or CuPy arrays of a float dtype, writable.  The optimizer owns them: each step
        changes them in place.
    lr : float
        Learning rate of steps that are called without one.
    betas : (float, float)
        Share of the averages of the gradient and of its square that each step keeps.
    eps : float
        Added to the root mean square, in units of the gradient.
    weight_decay : float
        Share of a parameter that is lost per step and unit of lr.
    state_bits : int
        Bits of an element of the averages: 32 (64 for a float64 parameter), or 8: codes, with a
        float32 scale for every 256 of them, for parameters of 4096 elements or more.
    groups : sequence of {"names": ..., "lr": ..., "weight_decay": ...}, optional
        Groups of parameters with an ``lr`` or a ``weight_decay`` of their own: ``names`` is a name,
        a pattern such as ``"*norm*"``, or a list of them.  What no group names has the options
        above.  A step with another rate scales the rates of groups as much: by its lr / lr.

    Attributes
    ----------
    groups : list of dict
        As torch's ``param_groups``: the groups with their names written out, then those that no
        group names.  A rate or decay that is set in one counts from the next step on.

    Raises
    ------
    ConfigError
        An option is out of its range, or a parameter is read-only; a group has an unknown key, no
        parameter, or one of another group.
    DTypeError, FrameworkError
        A parameter is not a float array of NumPy or CuPy, or has 8-bit averages and is float64; or
        parameters are on several GPUs.

    Notes
    -----
    On a GPU a step is one launch over the parameters of each group, if all of them are contiguous
    and of 32 or 16 bits.  It does not wait; reading ``steps`` waits.  Codes and scales are those of
    bitsandbytes' state1, absmax1, state2 and absmax2.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        state_bits: int = 32,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if state_bits not in (8, 32):
            raise ConfigError(f"AdamW: state_bits={state_bits} does not exist; choose 32 or 8")
        pair = isinstance(betas, tuple | list) and len(betas) == 2 and all(map(is_number, betas))
        if not pair or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"AdamW: betas={betas}; pass two numbers, each from 0 to below 1")
        _check_rates("AdamW", {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        check_in_place("AdamW", parameters)
        self.parameters = dict(parameters)
        self.home = next(iter(self.parameters.values()), None)  # all are on one GPU
        self.lr, self.betas = lr, (float(betas[0]), float(betas[1]))
        self.eps, self.weight_decay = eps, weight_decay
        self.groups = _groups(self.parameters, groups)
        self.launchers: list[Launcher] = []  # of the groups that have parameters
        with device_of(self.home):
            self.tensors = {n: _tensor(n, p, state_bits) for n, p in self.parameters.items()}
            self._prepare(0)

    @property
    def steps(self) -> int:
        """The number of steps that were not skipped; reading it waits for a GPU."""
        return self.launchers[0].steps if self.launchers else self._steps

    def _prepare(self, steps: int) -> None:
        arrays = [a for t in self.tensors.values() for a in (t.parameter, t.copy) if a is not None]
        self._steps, self.launchers = steps, []
        for names in self._names() if launchable(arrays) else ():
            tensors = {name: self.tensors[name] for name in names}
            self.launchers.append(Launcher(tensors, self.betas, steps))

    def _names(self) -> list[list[str]]:
        """Return the names of each group that has some."""
        return [group["names"] for group in self.groups if group["names"]]

    def keep_copies(self, copies: Mapping[str, Array]) -> None:
        """Make every step also write its parameters, rounded once, to these 16-bit arrays.

        The parameters, float32, are then the master weights of a model that computes in 16 bits
        with the copies; gradients may have the copies' dtype.  The copies are first written now.

        Parameters
        ----------
        copies : {name: array}
            float16 or bfloat16, writable, of the parameters' shapes.  Parameters that are not
            named have no copy.

        Raises
        ------
        ConfigError
            A name is unknown, or an array is read-only.
        ShapeError, DTypeError, FrameworkError
            A copy does not fit its parameter, or the parameter is not float32.
        """
        check_in_place("AdamW.keep_copies", copies)
        if unknown := sorted(copies.keys() - self.parameters.keys()):
            raise ConfigError(f"AdamW.keep_copies: unknown {unknown}; pass names of parameters")
        changed = {f"the copy of {name}": copy for name, copy in copies.items()} | self.parameters
        check_in_place("AdamW.keep_copies", changed)
        for name, copy in copies.items():
            what, parameter = f"AdamW.keep_copies: {name}", self.parameters[name]
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
            self._prepare(self.steps)

    def step(
        self,
        gradients: Mapping[str, Array],
        lr: float | None = None,
        *,
        finite: Any = True,
        factor: Any = 1.0,
    ) -> None:
        """Update every parameter in place, from its gradient.

        Parameters
        ----------
        gradients : {name: array}
            One for every parameter, with its shape, in its dtype, its copy's dtype or float32.
        lr : float, optional
            Learning rate of this step, from a schedule; groups with their own keep their share.
        finite : bool, or bool array of shape ()
            False: skip the step, and change nothing at all.
        factor : float, or float32 array of shape ()
            Gradients are multiplied by it first: 1 / the scale of the loss, or less to clip them.
            ``measure_gradients`` returns both, on a GPU as arrays that the host never reads.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or lr is negative or not finite.
        ShapeError, DTypeError, FrameworkError
            A gradient does not fit its parameter.  Nothing has been changed then.
        """
        rate = self.lr if lr is None else lr
        if not is_number(rate) or not 0 <= rate < math.inf:
            raise ConfigError(f"AdamW.step: lr={rate}; pass a finite number, 0 or more")
        kind = getattr(getattr(factor, "dtype", None), "kind", "O")
        if not is_number(factor) and not (kind in "iuf" and factor.shape == ()):
            raise ConfigError(f"AdamW.step: factor={factor!r}; pass a number, or one in an array")
        if getattr(finite, "shape", ()) != ():
            raise ConfigError(f"AdamW.step: finite={finite!r}; pass True or False for all of them")
        check_mapping("AdamW.step", gradients)
        if gradients.keys() != self.parameters.keys():
            missing = sorted(self.parameters.keys() - gradients.keys())
            unknown = sorted(map(str, gradients.keys() - self.parameters.keys()))
            raise ConfigError(
                f"AdamW.step: missing {missing}, unknown {unknown};"
                " pass one gradient for every parameter, by its name"
            )
        for name, tensor in self.tensors.items():
            what = f"AdamW.step: gradient of {name}"
            _check(what, gradients[name], tensor.parameter, tensor.dtypes)
        rates = [self._rates(group, rate) for group in self.groups if group["names"]]
        ordered = [[gradients[name] for name in names] for names in self._names()]
        with span("AdamW.step", self.home, lambda: self._traffic([*gradients.values()])):
            if self.launchers:
                for launcher, own, options in zip(self.launchers, ordered, rates, strict=True):
                    launcher(own, finite=finite, factor=factor, eps=self.eps, **options)
            elif finite:
                self._steps += 1
                shared = {"eps": self.eps, "betas": self.betas, "step": self._steps}
                for names, own, options in zip(self._names(), ordered, rates, strict=True):
                    options |= {**shared, "factor": float(factor)}
                    for name, gradient in zip(names, own, strict=True):
                        host_step(self.tensors[name], gradient, **options)

    def _rates(self, group: Mapping[str, Any], rate: float) -> dict[str, Any]:
        """Return the rate and the decay of a group in a step of this rate."""
        own = {key: group.get(key, getattr(self, key)) for key in RATES}
        _check_rates("AdamW.step: groups", own)
        if "lr" not in group:
            return own | {"lr": rate}
        return own | {"lr": own["lr"] * (rate / self.lr) if self.lr else own["lr"]}

    def _traffic(self, gradients: Sequence[Array]) -> int:
        """Return the bytes that a step moves: gradients are read, copies written, the rest both."""
        held = (each for tensor in self.tensors.values() for each in tensor if each is not None)
        copies = sum(t.copy.nbytes for t in self.tensors.values() if t.copy is not None)
        return 2 * sum(array.nbytes for array in held) - copies + sum(g.nbytes for g in gradients)

    def state(self) -> dict[str, Array]:
        """Return the arrays that a checkpoint saves besides the parameters, for ``load_state``.

        ``steps`` is a NumPy integer array of shape (); ``mean.<name>``, ``square.<name>`` and, for
        8-bit averages, ``mean_scale.<name>`` and ``square_scale.<name>`` are the optimizer's own
        arrays, which the next step changes: save or copy them before it.  With groups, ``groups``
        is an array of their (lr, weight_decay) in their order, NaN where a group has none of its
        own; the last row is of the parameters that no group names.
        """
        rates = np.array([[group.get(key, math.nan) for key in RATES] for group in self.groups])
        groups = {"groups": rates} if len(rates) > 1 or not np.isnan(rates).all() else {}
        return {"steps": np.array(self.steps), **groups, **self._states()}

    def _states(self) -> dict[str, Any]:
        return {
            f"{field}.{name}": getattr(tensor, field)
            for field in ("mean", "square", "mean_scale", "square_scale")
            for name, tensor in self.tensors.items()
            if getattr(tensor, field) is not None
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Continue from a ``state()``; later steps have the same bits as without the interruption.

        The rates of groups become those of the state, if it has some.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or steps is not an integer of 0 or more.
        ShapeError, DTypeError, FrameworkError
            An array does not fit its parameter.  Nothing has been changed then.
        """
        check_mapping("AdamW.load_state", state)
        own = self._states()
        steps = np.asarray(state.get("steps"))
        names = own.keys() | {"steps"}
        wide = state.get("groups")
        shape = len(self.groups), len(RATES)
        rates = np.full(shape, math.nan) if wide is None else np.asarray(wide)
        names |= {"groups"} if wide is not None else set()
        if rates.shape != shape:
            raise ShapeError(
                f"AdamW.load_state: groups has shape {rates.shape}; this optimizer has"
                f" {shape[0]} groups, with that of all other parameters",
                expected=shape,
                actual=rates.shape,
            )
        if rates.dtype.kind != "f" or (rates < 0).any() or np.isinf(rates).any():
            problem = f"AdamW.load_state: groups holds {rates.tolist()}"
            raise ConfigError(f"{problem}; pass finite rates of 0 or more, NaN for none")
        if state.keys() != names or steps.shape or steps.dtype.kind not in "iu" or steps < 0:
            different = sorted(map(str, state.keys() ^ names))
            raise ConfigError(
                f"AdamW.load_state: names differ in {different}, steps is {steps};"
                " pass what state() returned for the same parameters"
            )
        for name, array in own.items():
            _check(f"AdamW.load_state: {name}", state[name], array, (array.dtype,))
        for name, array in own.items():
            array[...] = state[name]
        for group, own_rates in zip(self.groups, rates.tolist(), strict=True):
            for key, rate in zip(RATES, own_rates, strict=True):
                if wide is None:
                    continue
                group.pop(key, None)
                if not math.isnan(rate):
                    group[key] = rate
        self._prepare(int(steps))


def _groups(
    parameters: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups with the names of their parameters, then those that are in none."""
    result, rest = list[dict[str, Any]](), dict.fromkeys(parameters)
    every: Any = groups
    if isinstance(every, Mapping | str) or not isinstance(every, Collection):
        raise ConfigError(f"AdamW(groups={groups!s:.80}): pass a list of {EXAMPLE}")
    for group in every:
        call = f"AdamW(groups=[..., {group!s:.80}])"
        names: Any = group.get("names") if isinstance(group, Mapping) else None
        names = [names] if isinstance(names, str) else names
        listed = isinstance(names, Collection) and all(isinstance(n, str) for n in names)
        if not listed or not group.keys() <= {"names", *RATES}:
            raise ConfigError(f"{call}: pass a group as {EXAMPLE}")
        _check_rates(call, group)
        own: dict[str, None] = {}
        for pattern in names:
            found = [pattern] if pattern in parameters else []
            found = found or [name for name in parameters if fnmatchcase(name, pattern)]
            if not found:
                some = ", ".join(list(parameters)[:3])
                raise ConfigError(f"{call}: no parameter is named {pattern!r}; names are as {some}")
            own |= dict.fromkeys(found)
        if twice := [name for name in own if name not in rest]:
            raise ConfigError(f"{call}: {twice[0]} is in another group too; name it in one of them")
        for name in own:
            del rest[name]
        result.append({**group, "names": [*own]})
    return [*result, {"names": [*rest]}]


def _check_rates(call: str, options: Mapping[str, Any]) -> None:
    """Raise unless lr, eps and weight_decay, where they are given, are numbers of 0 or more."""
    for option, value in options.items():
        if option != "names" and (not is_number(value) or not 0 <= value < math.inf):
            raise ConfigError(f"{call}: {option}={value}; pass a finite number, 0 or more")


def _tensor(name: str, parameter: Any, bits: int) -> Tensor:
    """Return the Tensor of a parameter, with averages of zeros."""
    wide = allowed("stat", parameter.dtype)[0]
    if bits == 32 or parameter.size < SMALL:
        mean, square = (np.zeros_like(parameter, wide) for _ in range(2))
        return Tensor(parameter, None, mean, square, None, None)
    if wide != FLOATS[2]:
        raise DTypeError(f"AdamW: {name} is {parameter.dtype}; 8-bit averages need 32 bits or 16")
    mean, square = (np.zeros_like(parameter, np.uint8, order="C") for _ in range(2))
    blocks = -(-parameter.size // BLOCK)
    scales = (np.zeros_like(parameter, np.float32, shape=(blocks,)) for _ in range(2))
    return Tensor(parameter, None, mean, square, *scales)


def _check(what: str, array: Array, model: Array, dtypes: Sequence[Any]) -> None:
    """Raise unless array has the library and shape of model and one of the dtypes."""
    place, wanted = (framework_of(a, what) for a in (array, model))
    if several_gpus() and place == wanted == "cupy":
        place, wanted = (f"cupy {a.device}" for a in (array, model))
    if place != wanted:
        raise FrameworkError(f"{what} comes from {place}; it must come from {wanted}")
    if array.shape != model.shape:
        problem = f"{what} has shape {array.shape}; it must be {model.shape}"
        raise ShapeError(problem, expected=tuple(model.shape), actual=tuple(array.shape))
    if array.dtype not in dtypes:
        cure = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
        raise DTypeError(f"{what} is {array.dtype}; it must be {cure}")
    check_place(what, array)
