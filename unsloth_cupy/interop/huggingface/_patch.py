"""``patch`` and ``unpatch``: parts are tried one after the other; a part that fails is undone."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...errors import ConfigError, FrameworkError
from . import (
    _attention,
    _experts,
    _loss,
    _modules,
    _qk_norm,
    _recurrence,
    _residual,
    _rotary,
    _router,
)
from ._changes import Changes, Nothing, own_forward
from ._quantized import quantized
from ._report import Report
from ._trials import Candidate, Refused, Texts, at_rest, near

MARK = "_unsloth_cupy"
ALONE = {
    "norm": _modules.norm,
    "mlp": _modules.mlp,
    "embedding": _modules.table,
    "lora": _modules.lora,
    "quantized": quantized,
}
MIXTURE = ("experts", "router")
PARTS = (*ALONE, *MIXTURE, "recurrence", "rotary", "qk_norm", "attention", "residual", "loss")


def patch(model: Any, *, parts: Iterable[str] | None = None) -> Report:
    """Patch a transformers model to compute with this library's ops.

    A module is replaced if its structure is known and its replacement gives the same results on
    random inputs.  A model that is already patched is first unpatched, then patched again.  If
    patching fails, the model is unchanged.

    A deep copy of a patched model is patched.  ``torch.save`` and ``pickle`` store the unpatched
    model: patch the model again after loading.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, or a module that wraps it, such as a peft model.
    parts : iterable of str, optional
        The kinds of modules to replace, out of ``norm``, ``mlp``, ``embedding``, ``lora``,
        ``quantized`` (layers of bitsandbytes), ``experts`` and ``router`` (of mixtures of experts),
        ``recurrence`` (delta rules, Mamba2 and their convolutions), ``rotary``, ``qk_norm`` (norms
        and rotary embedding of queries and keys), ``attention``, ``residual`` (an addition and the
        norm after it) and ``loss``; all by default.

    Returns
    -------
    report : Report
        The replaced modules, and why each other module was not replaced; ``print(report)`` shows a
        table.

    Raises
    ------
    FrameworkError
        ``model`` is not a transformers model, or no op can read its weights where they are stored.
    ConfigError
        A name in ``parts`` is unknown.
    """
    chosen = chosen_parts(parts)
    inner = _inner("patch", model)
    _check_weights(inner)
    earlier: Changes = vars(inner).get(MARK, Changes())
    places = [(inner, MARK), *earlier.places(inner)]
    values = [(owner, name, vars(owner).get(name, Nothing)) for owner, name in places]
    changes, report = Changes(), Report(type(inner).__name__)
    try:
        if MARK in vars(inner):
            vars(inner)[MARK] = Changes(earlier)  # a copy, as unpatch empties the list
            unpatch(model)
        with at_rest(model):
            _Patching(inner, changes, report, chosen).run()
        changes.set(inner, "__getstate__", MethodType(_unpatched, inner))
        changes.set(inner, "__deepcopy__", MethodType(_copied, inner))
    except BaseException:
        changes.since(0)
        for owner, name, value in values:
            vars(owner)[name] = value
            if value is Nothing:
                del vars(owner)[name]
        raise
    vars(inner)[MARK] = changes
    return report


def unpatch(model: Any) -> None:
    """Restore the parts of a model; results have the same bits as before ``patch``.

    A model that is not patched stays as it is.

    Raises
    ------
    FrameworkError
        This is not a model of transformers.
    ConfigError
        Another library has replaced a patched part after ``patch``; nothing is undone.
    """
    inner = _inner("unpatch", model)
    changes: Changes | None = vars(inner).get(MARK)
    if changes is not None:
        changes.check(wrapped=inner)  # without the state of the loss, our forward calls the model's
        changes.undo(inner)
        del vars(inner)[MARK]


def is_patched(model: Any) -> bool:
    """Return whether a model of transformers, or the model inside a module, is patched."""
    return MARK in vars(_inner("patch", model))


def chosen_parts(parts: Iterable[str] | None) -> set[str]:
    """Return the selected parts; raise ConfigError for an unknown one."""
    chosen = set(PARTS if parts is None else [parts] if isinstance(parts, str) else parts)
    if unknown := sorted(map(str, chosen - {*PARTS})):
        raise ConfigError(f"patch: parts={unknown} are not known; choose from {', '.join(PARTS)}")
    return chosen


def _inner(call: str, model: Any) -> Any:
    """Return the outermost model of transformers in a module."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        if isinstance(module, PreTrainedModel):
            return module
    raise FrameworkError(
        f"{call}: {type(model).__name__} is not a model of transformers, and contains none;"
        " pass the model that from_pretrained returned"
    )


def _check_weights(model: Any) -> None:
    """Raise for weights that no op can read."""
    for name, weight in model.named_parameters():
        kind, place = type(weight.data).__name__, weight.device.type
        if kind == "DTensor":
            cure = "patch the model before it is sharded (fully_shard, tensor parallel)"
            raise FrameworkError(f"patch: {name} is a DTensor, a shard of a weight; {cure}")
        if place not in ("cpu", "cuda"):
            cure = "load the weights" if place == "meta" else "move the model to a CPU or a GPU"
            raise FrameworkError(f"patch: {name} is on {place}, where no op runs; {cure} first")
    places = {str(weight.device) for weight in model.parameters()}
    if len(places) > 1 and not hasattr(model, "hf_device_map"):
        there = ", ".join(sorted(places))
        cure = "bring it to one, or load it with device_map"
        raise FrameworkError(f"patch: the weights of the model are on {there}; {cure}")


def _unpatched(model: Any) -> dict[str, Any]:
    """Return the attributes that pickle stores: of an unpatched copy, with the same tensors."""
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    unpatch(twin)
    # transformers' own hooks cannot be pickled; transformers adds them again in the next call
    for module in twin.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        for key, hook in [*module._forward_hooks.items()]:
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                del module._forward_hooks[key]
    return vars(twin)


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a patched model: of its attributes, not of those that pickle stores."""
    kind: Any = type(model)
    twin = memo[id(model)] = kind.__new__(kind)
    vars(twin).update(copy.deepcopy(vars(model), memo))
    return twin


class _Patching:
    """One run of ``patch``."""

    def __init__(self, model: Any, changes: Changes, report: Report, parts: set[str]) -> None:
        self.model, self.changes, self.report, self.parts = model, changes, report, parts
        self.notes: dict[nn.Module, list[Any]] = {}  # calls of rotary functions, by layer
        self.along: dict[nn.Module, _recurrence.Notes] = {}  # calls of recurrences, by layer
        self.rotations: dict[nn.Module, _rotary.Rotation] = {}  # by layer

    def run(self) -> None:
        for part in ALONE:
            if part in self.parts:
                self.alone(part)
        for part in MIXTURE:
            if part in self.parts:
                getattr(self, part)()
        whole = [p for p in PARTS if p in self.parts and p not in (*ALONE, *MIXTURE)]
        if not whole:
            return
        try:
            self.texts = Texts(self.model)
            self.record()
        except Exception as error:
            for part in whole:
                why = f"the model does not run on tokens alone: {_line(error)}"
                self.report.add(part, type(self.model).__name__, why)
            return
        for part in whole:
            getattr(self, part)()

    def attempt(self, part: str, module: nn.Module, work: Callable[[], None]) -> None:
        """Replace a part; if that fails, undo its changes and report the reason."""
        count = len(self.changes)
        try:
            work()
        except Exception as error:
            self.changes.since(count)
            self.leave(part, module, error)
        else:
            self.report.add(part, type(module).__name__)

    def leave(self, part: str, module: nn.Module, error: Exception) -> None:
        """Report the reason why a part was not replaced."""
        why = str(error) if isinstance(error, Refused) else f"a trial fails: {_line(error)}"
        self.report.add(part, type(module).__name__, why)

    def alone(self, part: str) -> None:
        """Replace the modules of a part that consists of a single module."""
        for module in [*self.model.modules()]:
            try:
                candidate = ALONE[part](module, self.model.dtype)
            except Exception as error:
                self.leave(part, module, error)
                continue
            if candidate is not None:
                self.attempt(part, module, partial(self.put, module, candidate))

    def put(self, module: nn.Module, candidate: Candidate) -> None:
        """Set the first forward of a candidate that gives the module's results; else refuse."""
        if not own_forward(module):
            raise Refused("another library replaced its forward")
        expected, count = candidate.run(module), len(self.changes)
        for forward in candidate.forwards:
            self.changes.forward(module, forward)
            try:
                if near(candidate.run(module), expected, candidate.dtype):
                    return
            except Exception:  # the structure of the module differs from the assumed one
                pass
            self.changes.since(count)
        raise Refused("no formula known gives the same")

    def experts(self) -> None:
        """Replace the experts of all modules that share a config, or of none of these modules."""
        groups: dict[int, list[nn.Module]] = {}
        for module in self.model.modules():
            if _experts.asks(module):
                groups.setdefault(id(module.config), []).append(module)
            elif _experts.own(module):
                why = "its class does not let other libraries compute its experts"
                self.report.add("experts", type(module).__name__, why)
        for modules in groups.values():
            count = len(self.changes)
            try:
                _experts.take(self.changes, modules)
            except Exception as error:
                self.changes.since(count)
                for module in modules:
                    self.leave("experts", module, error)
            else:
                for module in modules:
                    self.report.add("experts", type(module).__name__)

    def router(self) -> None:
        for module in self.model.modules():
            if _router.is_router(module):
                self.attempt("router", module, partial(_router.take, self.changes, module))

    def record(self) -> None:
        """Run the model once; record the arguments of functions that ops may compute."""
        count = len(self.changes)
        kinds: dict[str, tuple[Any, Any, dict[nn.Module, Any]]] = {
            "rotary": (_rotary.named, _rotary.record, self.notes),
            "recurrence": (_recurrence.functions_of, _recurrence.record, self.along),
        }
        try:
            for module in filter(own_forward, self.model.modules()):
                for part, (has, record, notes) in kinds.items():
                    if part in self.parts and has(module):
                        try:
                            notes[module] = record(self.changes, module)
                        except Refused as error:
                            self.leave(part, module, error)
            self.texts.run(self.model)
        finally:
            self.changes.since(count)

    def recurrence(self) -> None:
        for module, notes in self.along.items():
            work = partial(_recurrence.take, self.changes, module, notes)
            self.attempt("recurrence", module, work)

    def rotary(self) -> None:
        for module, notes in self.notes.items():
            self.attempt("rotary", module, partial(self.turn, module, notes))

    def turn(self, module: nn.Module, notes: list[Any]) -> None:
        self.rotations[module] = _rotary.take(self.changes, module, notes)

    def qk_norm(self) -> None:
        layers = [module for module in self.notes if _qk_norm.norms_of(module)]
        calls = self.texts.observe(self.model, layers)
        for layer in layers:
            arguments = self.rotations.get(layer), calls.get(layer), self.texts
            work = partial(_qk_norm.take, self.changes, layer, *arguments)
            self.attempt("qk_norm", layer, work)

    def attention(self) -> None:
        work = partial(_attention.take, self.changes, self.model, self.texts)
        self.attempt("attention", self.model, work)

    def residual(self) -> None:
        layers = {m: f for m in self.model.modules() if (f := _residual.forward_of(m))}
        calls = self.texts.observe(self.model, layers)
        for layer, forward in layers.items():
            work = partial(
                _residual.take, self.changes, layer, forward, calls.get(layer), self.texts
            )
            self.attempt("residual", layer, work)

    def loss(self) -> None:
        work = partial(_loss.take, self.changes, self.model, self.texts)
        self.attempt("loss", self.model, work)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
