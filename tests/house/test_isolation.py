"""The fixture of conftest.py undoes what a test changes before the next one starts."""

import ast
import contextlib
import importlib
import os
import signal
import sys
import types
from contextlib import suppress

import numpy as np
import pytest

from unsloth_cupy import AttentionConfig, rms_norm, softmax
from unsloth_cupy.core import gpu as core_gpu
from unsloth_cupy.core import target
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import DeviceError
from unsloth_cupy.ops.common import faults

from ..harness.isolation import caches, isolated, modules, variables
from ..harness.tracked import ROOT, tracked
from ..machines.stand_in import gpu

X = np.ones((4, 64), np.float32)


def full() -> list[str]:
    """Return the caches that are not empty, and the ops that have recorded plans."""
    several = [name for name, cache in caches().items() if cache.cache_info().currsize]
    return several + [name for name, op in OPS.items() if op.routes]


def test_every_test_starts_with_empty_caches() -> None:
    assert full() == []


def test_what_is_asked_of_a_stand_in_is_forgotten() -> None:
    with isolated():
        with gpu("90") as machine:
            rms_norm(machine.array((4, 4096), "float32"), machine.array(4096, "float32"))
            softmax(machine.array((4, 4096), "float16"))
            AttentionConfig().resolve(10**6)
        rms_norm(X, X[0])
        assert {"unsloth_cupy.core.gpu.limits_of", "unsloth_cupy.core.kernel.Kernel"} <= {*full()}
    assert full() == []
    with pytest.raises(DeviceError, match="no such GPU"):
        AttentionConfig().resolve(10**6)


def test_variables_and_the_process_are_as_before() -> None:
    environment, folder, handler = dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGINT)
    before = {str(n): vars(n.owner)[n.name] for n in variables()}
    core = "unsloth_cupy.core."
    assert {f"{core}target.targets", "unsloth_cupy.ops.common.faults._records"} <= before.keys()
    real, ops, errors = sys.modules["json"], dict(OPS), np.geterr()
    with isolated():
        target.targets = ()
        core_gpu.NO_SWITCH = contextlib.nullcontext(X)
        faults._records[7] = X
        OPS["same"] = OPS["softmax"]
        os.environ["UNSLOTH_CUPY_TEST"] = "1"
        os.environ.pop("PATH", None)
        os.chdir("/")
        np.seterr(all="ignore")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.modules["json"] = sys.modules["cupy_stand_in"] = types.ModuleType("stand-in")
        sys.modules["imported_half"] = types.ModuleType("made by an extension, as torch's are")
        del sys.modules["ast"]
    assert {str(n): vars(n.owner)[n.name] for n in variables()} == before
    assert 7 not in faults._records
    assert ops == OPS
    assert (dict(os.environ), os.getcwd(), np.geterr()) == (environment, folder, errors)
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.modules["json"] is real
    assert sys.modules["ast"] is ast
    assert "cupy_stand_in" not in sys.modules
    assert sys.modules.pop("imported_half")


def test_every_cache_that_the_sources_name_is_found() -> None:
    """They must be at the top of a module or a class, as isolation.py does not find others."""
    for name in modules():
        if not name.endswith((".__main__", ".peers")):
            with suppress(ImportError):  # of a library that is not installed
                importlib.import_module(name)
    lost = []
    for path in tracked("unsloth_cupy/**/*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner, node in [(o, n) for o in (tree, *classes) for n in o.body]:
            if isinstance(node, ast.FunctionDef):
                named = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
                cached = {name.rpartition(".")[2] for name in named} & {"cache", "lru_cache"}
                if cached and module in sys.modules:
                    inside = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                    lost.append(f"{module}.{inside}{node.name}")
    assert lost
    assert {*lost} <= caches().keys(), sorted({*lost} - caches().keys())
