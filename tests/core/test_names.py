"""Public names: what packages show, and how calls that do not fit, and others' words, are answered.

Every public function, class and method is called with an option that it does not have, with too
many arguments and with none: each error is the library's.
"""

import importlib
import inspect
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
import pytest

import unsloth_cupy
from unsloth_cupy import finetune, models
from unsloth_cupy.cli.commands import COMMANDS, group
from unsloth_cupy.core.names import RENAMED, checked, publish, wrong_call
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.other_names import ABSENT, ATTRIBUTES, OTHER_COMMANDS, OTHER_NAMES
from unsloth_cupy.errors import (
    ArgumentError,
    ConfigError,
    UnknownNameError,
    UnslothCupyError,
)
from unsloth_cupy.models.transformer import SHOWN

from ..harness.tracked import ROOT, tracked
from ..models.peers import SIZES

PACKAGES = [
    unsloth_cupy,
    *(
        importlib.import_module(f"unsloth_cupy.{name}")
        for name in ("finetune", "interop", "losses", "models", "parallel", "serving")
    ),
    *([unsloth_cupy.interop.huggingface] if "patch" in dir(unsloth_cupy) else []),
]
CONFIG = {**SIZES, "model_type": "llama"}
X = np.ones((2, 4), np.float32)


def is_made(kind: type) -> bool:
    """Return whether users create objects of a class, or its methods are called."""
    return not issubclass(kind, BaseException) and not getattr(kind, "_is_protocol", False)


def is_own(function: types.FunctionType) -> bool:
    """Return whether a method is not that of another library's class."""
    return function.__module__.startswith("unsloth_cupy.")


def public() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Yield every public function, class and method by name, and whether it is bound to None."""
    for package in PACKAGES:
        for name in dir(package):
            value = getattr(package, name)
            if name[:2] == "__" or isinstance(value, types.ModuleType) or not callable(value):
                continue
            full = f"{package.__name__}.{name}"
            yield from [(full, value, False)] * (not isinstance(value, type) or is_made(value))
            if isinstance(value, type) and is_made(value):
                for each in dir(value):
                    member = inspect.getattr_static(value, each)
                    if isinstance(member, types.FunctionType) and each[0] != "_" and is_own(member):
                        yield f"{full}.{each}", member, True


PUBLIC = {name: (function, bound) for name, function, bound in public()}
# Calls whose options go on to others, of which some are those of a user's function.
BEFORE = {name.rpartition(".")[2] for name in RENAMED}
ANY_OPTIONS = ("checkpoint", "explain")


@pytest.mark.parametrize("name", PUBLIC)
def test_calls_that_do_not_fit_raise_the_librarys_error(name: str) -> None:
    function, bound = PUBLIC[name]
    known = dict([*inspect.signature(function).parameters.items()][bound:])
    kinds = {parameter.kind for parameter in known.values()}
    own = [object()] * bound
    if inspect.Parameter.VAR_KEYWORD not in kinds and not name.endswith(ANY_OPTIONS):
        with pytest.raises(ArgumentError, match=r"\(nonsense=\.\.\.\): there is no such option"):
            function(*own, nonsense=1)
        for other, (first, *_) in OTHER_NAMES.items():
            if first in known and other not in {*known, *BEFORE}:
                with pytest.raises(ArgumentError, match=f"{other} is named {first} here"):
                    function(*own, **{other: 1})
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        with pytest.raises(UnslothCupyError):
            function(*own, *[X] * (len(known) + 1))
    least = [n for n, p in known.items() if p.default is p.empty and "VAR" not in p.kind.name]
    if least and not isinstance(function, Op):  # its arrays are optional in Python's eyes
        with pytest.raises(UnslothCupyError, match=f"{least[0]}.* missing"):
            function(*own)


@pytest.mark.parametrize("name", OPS)
def test_ops_that_lack_arrays_or_options_raise_the_librarys_error(name: str) -> None:
    op = OPS[name]
    with pytest.raises(UnslothCupyError, match=rf"^{op.called}"):
        op()
    with pytest.raises(ArgumentError, match=rf"^{op.called}\(nonsense=\.\.\.\)"):
        op(nonsense=1)


def test_a_type_error_from_inside_of_a_call_stays() -> None:
    def function(x: Any, *, count: int = 1) -> Any:
        return x + count

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        checked(function)(None)
    assert not isinstance(caught.value, UnslothCupyError)


def test_functions_that_answer_are_those_of_their_modules() -> None:
    for package in PACKAGES:
        for name in dir(package):
            value = getattr(package, name)
            if name[:2] != "__" and isinstance(value, types.FunctionType | type):
                assert pickle.loads(pickle.dumps(value)) is value, name


# ---- words of others ----------------------------------------------------------------------------
def options() -> set[str]:
    """Return the names of all options, of functions, methods, fields and commands."""
    functions = [function for function, _ in PUBLIC.values()] + [*OPS.values()]
    signatures = [inspect.signature(getattr(f, "definition", f)) for f in functions]
    names = {name for signature in signatures for name in signature.parameters}
    flags = {flag for each in COMMANDS for option in each.params for flag in option.opts}
    return names | {flag.lstrip("-").replace("-", "_") for flag in flags}


def test_every_answer_is_an_option_somewhere() -> None:
    known = options()
    for other, own in OTHER_NAMES.items():
        assert {*own} <= known, other
        assert other == other.lower().replace("-", "_")
    for old, new in RENAMED.items():
        assert new in known, old
    assert not ABSENT.keys() & (OTHER_NAMES.keys() | RENAMED.keys())


def test_words_of_the_page_for_users_of_others_are_checked() -> None:
    text = (ROOT / "docs" / "guide" / "from-others.md").read_text(encoding="utf-8")
    words = set()
    for cell in re.findall(r"^\| (.*?) \|", text.partition("## Layouts")[0], re.M):
        for span in re.findall(r"`(.*?)`", cell):
            words |= {*re.findall(r"(\w+)=", span), *re.findall(r"^(?:\w+\.)*(\w+)", span)}
    answered_names = {name.rpartition(".")[2] for name in ATTRIBUTES} | SHOWN
    assert words - OTHER_NAMES.keys() - ABSENT.keys() - answered_names - options() == {"Trainer"}


CALLED = re.compile(r"(?:call|pass|read|subclass) ([\w.]+)")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_answer_to_a_name_is_public(name: str) -> None:
    if match := CALLED.match(ATTRIBUTES[name]):
        first, *rest = match[1].rstrip(".").split(".")
        value = getattr(unsloth_cupy, first, None) or getattr(models, first)
        for each in rest:
            value = getattr(value, each, each in SHOWN)
            assert value
    else:
        assert "; " in ATTRIBUTES[name] or ": " in ATTRIBUTES[name]  # why there is none, the cure
    kind, _, last = name.rpartition(".")
    owner: Any = unsloth_cupy if not kind else getattr(unsloth_cupy, kind, models.Transformer)
    assert not hasattr(owner, last)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)
def test_names_that_a_package_lacks(package: types.ModuleType) -> None:
    for name in ("FastLanguageModel", "SFTTrainer", "from_pretrained", "AutoTokenizer"):
        assert not hasattr(package, name)
        cure = re.escape(ATTRIBUTES[name])
        with pytest.raises(UnknownNameError, match=rf"^{package.__name__} has no {name}; {cure}"):
            getattr(package, name)
        with pytest.raises(ImportError, match=cure):
            exec(f"from {package.__name__} import {name}")
    with pytest.raises(UnknownNameError, match=r"has no nonsense$"):
        _ = package.nonsense
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {package.__name__} import nonsense")


def test_names_that_objects_lack() -> None:
    model, tape = models.create(CONFIG, seed=0), unsloth_cupy.Tape()
    for lacks, cure in (
        (lambda: model.train, r"Transformer has no train; call Trainer\(model, data"),
        (lambda: model.save_pretrained("x"), r"call Transformer.save\(folder\)"),
        (lambda: model.nonsense, r"Transformer has no nonsense$"),
        (lambda: tape.watch(X).backward(), r"call Tape.gradients\(of, wrt\)"),
        (lambda: unsloth_cupy.AdamW({"w": X}).zero_grad(), "leave it out"),
        (lambda: finetune.Settings().learning_rate, "Settings has no learning_rate"),
    ):
        with pytest.raises(UnknownNameError, match=cure):
            lacks()
    for call in (lambda: model(X), lambda: model(input_ids=X)):
        with pytest.raises(ArgumentError, match=r"call model.logits\(tokens\)"):
            call()
    assert not hasattr(model, "nonsense")
    assert issubclass(ArgumentError, ConfigError)
    assert issubclass(ArgumentError, TypeError)
    assert issubclass(UnknownNameError, AttributeError)


def test_a_property_that_lacks_a_name_itself_says_so() -> None:
    class Own:
        @property
        def broken(self) -> Any:
            return object().nonsense  # type: ignore[attr-defined]

    Own.__module__ = "unsloth_cupy.own"
    with pytest.raises(AttributeError, match="'object' object has no attribute 'nonsense'"):
        _ = checked(Own)().broken


def test_settings_are_answered_where_a_trainer_takes_them() -> None:
    for option, cure in (
        ("learning_rate", r"pass settings=Settings\(lr=\.\.\.\)"),
        ("lr", r"it is an option of Settings; pass settings=Settings\(lr=\.\.\.\)"),
        ("train_dataset", "named data here"),
        ("r", "named lora here"),
        ("use_dora", r"pass settings=Settings\(dora=\.\.\.\)"),
        ("tokenizer", "tokenizer of the model's folder"),
    ):
        with pytest.raises(ArgumentError, match=rf"^Trainer\({option}=.*{cure}"):
            finetune.Trainer(**{option: 1})


def test_a_word_that_goes_on_to_another_call() -> None:
    model = models.create(CONFIG, seed=0)
    for call, message in (
        (lambda: model.add_adapter(r=4), "r is named rank here"),
        (lambda: model.add_adapter(4, lora_alpha=8), "lora_alpha is named alpha here"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


def test_classes_without_arguments_combine_with_others() -> None:
    class Other:
        def __init__(self, x: int) -> None:
            self.x = x

    class Both(finetune.Callback, Other):
        pass

    assert Both(3).x == 3


def test_an_argument_is_passed_once() -> None:
    known = inspect.signature(lambda x, y=1: x).parameters
    assert "x is passed by position, too" in str(wrong_call("f", known, (1,), {"x": 2}))
    assert wrong_call("f", known, (1,), {"y": 2}) is None


# ---- commands -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_every_command_that_is_meant_is_one(name: str) -> None:
    command, *words = OTHER_COMMANDS[name].split()
    known = {flag for each in group.commands[command].params for flag in each.opts}
    assert {word for word in words if word[0] == "-"} <= known
    assert name not in group.commands
    context = click.Context(group, info_name="unsloth-cupy")
    for word in (name, name.upper(), name.replace("-", "_")):
        with pytest.raises(click.UsageError, match=f"use unsloth-cupy {OTHER_COMMANDS[name]}"):
            group.resolve_command(context, [word, "x"])


def test_a_command_that_is_spelled_like_another() -> None:
    context = click.Context(group, info_name="unsloth-cupy")
    with pytest.raises(click.UsageError, match="'finetun'; use unsloth-cupy finetune"):
        group.resolve_command(context, ["finetun"])
    with pytest.raises(click.UsageError, match=r"No such command 'nonsense'\.$"):
        group.resolve_command(context, ["nonsense"])


# ---- completion ---------------------------------------------------------------------------------
@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)
def test_a_package_shows_its_public_names(package: types.ModuleType) -> None:
    shown = {name for name in dir(package) if name[:2] != "__"}
    modules = {n for n in shown if isinstance(getattr(package, n), types.ModuleType)}
    assert shown - modules - {"sum"} == {*package.__all__}
    rooms = {"errors", "finetune", "interop", "losses", "models", "parallel", "serving"}
    places = {"unsloth_cupy": rooms, "unsloth_cupy.interop": {"huggingface", "jax", "torch"}}
    assert modules <= places.get(package.__name__, set())
    text = (ROOT / package.__name__.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    pairs = re.findall(r"\b(\w+) as (\w+),?$", text, re.M)
    named = {name for own, name in pairs if own == name and name[0] != "_"}
    assert named | modules == shown


def test_names_at_the_top_are_imported_on_first_access() -> None:
    names = ("Lora", "Settings", "Trainer", "load", "patch", "read_data")
    assert {*names} <= {*dir(unsloth_cupy)}
    for name in names[:3]:
        assert getattr(unsloth_cupy, name) is getattr(finetune, name)
    assert unsloth_cupy.read_data is finetune.read_data
    assert unsloth_cupy.load is models.load
    program = (
        "import sys, unsloth_cupy as uc; before = {*sys.modules}; uc.Trainer, uc.finetune.Lora;"
    )
    program += "print('unsloth_cupy.finetune' in before, uc.load is uc.models.load)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"


def test_a_name_that_needs_what_is_not_installed_is_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("unsloth_cupy.own")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(sys, "path", [])
    publish(package.__name__, {"patch": "interop.huggingface", "load": "models"})
    assert package.__all__ == ["load"]
    assert "patch" not in dir(package)


def test_a_model_shows_what_is_documented() -> None:
    model = models.create(CONFIG, seed=0)
    shown = {name for name in dir(model) if name[:2] != "__"}
    for name in shown:
        assert hasattr(model, name), name
    pages = [ROOT / "README.md", *tracked("docs/**/*.md"), *tracked("docs/**/*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("unsloth_cupy")]
    described = "\n".join(kind.__doc__ or "" for kind in kinds)
    used = {*re.findall(r"\bmodel\.([a-z_]+)", text)} & {*object.__dir__(model)}
    assert used <= shown
    for name in shown:
        member = getattr(type(model), name, None)
        own = inspect.getdoc(member) if callable(member) or isinstance(member, property) else ""
        assert own or re.search(rf"^ +{name}\b.* :|\b{name}\b", described + text, re.M), name
