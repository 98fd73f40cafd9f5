"""Strides of tensors: results have those of torch's, and gradients are right for any."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

from unsloth_cupy.bench import cases  # noqa: E402
from unsloth_cupy.interop._wiring import operators  # noqa: E402

from ..harness.parity import emulator  # noqa: E402
from ..harness.sampling import Sample  # noqa: E402
from .calls import SCALE, drawn, every_call  # noqa: E402

EMULATED = 2  # ops whose kernels a run judges
some_calls = pytest.mark.parametrize(
    every_call.args[0], Sample.one_in(3, every_call.args[1])
)  # they take turns, as there are hundreds
GRADIENTS = {op.backward for op in operators()}
FORWARD = [op for op in operators() if op not in GRADIENTS and op.__name__ != "rope_tables"]


def inner_first(tensor):
    """Return the same values with the first axis innermost in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def outer_swapped(tensor):
    """Return the same values with the first two axes swapped in memory, as heads and tokens."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


LAYOUTS = {"inner first": inner_first, "outer swapped": outer_swapped}


def tensors_of(call, view=lambda tensor: tensor, trained=()):
    """Return the arrays of a call as tensors by name, in a layout; the trained have a gradient."""
    result = {}
    for name, array in call.arrays.items():
        result[name] = array
        if isinstance(array, np.ndarray):
            tensor = torch.from_numpy(np.array(array))
            tensor = view(tensor) if tensor.ndim > 1 else tensor
            result[name] = tensor.requires_grad_(name in trained)
    return result


def called(call, tensors):
    """Call an op with tensors; return its results that are tensors."""
    result = call.op.call([tensors[name] for name in call.op.names], dict(call.options))
    results = result if isinstance(result, tuple) else (result,)
    return [each for each in results if isinstance(each, torch.Tensor)]


def judge_strides(results, tensors):
    """Raise unless each result is contiguous, or lies in the memory of an argument."""
    arguments = [each for each in tensors.values() if isinstance(each, torch.Tensor)]
    places = {each.untyped_storage().data_ptr() for each in arguments}
    for result in results:
        shared = result.untyped_storage().data_ptr() in places
        assert shared or result.is_contiguous(), (tuple(result.shape), result.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.__name__)
def test_results_are_contiguous(op, layout):
    call = cases.draw(op, SCALE)
    tensors = tensors_of(call, LAYOUTS[layout])
    judge_strides(called(call, tensors), tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@some_calls
def test_gradients_are_contiguous(op, optional, layout):
    call, names = drawn(op, optional)
    tensors = tensors_of(call, LAYOUTS[layout], names)
    results = [each for each in called(call, tensors) if each.grad_fn is not None]
    ones = {
        f"d{i}": LAYOUTS[layout](torch.ones(r.shape)) if r.ndim > 1 else torch.ones(r.shape)
        for i, r in enumerate(results)
    }
    trained = [tensors[name] for name in names]
    gradients = torch.autograd.grad(results, trained, [*ones.values()], allow_unused=True)
    judge_strides([each for each in gradients if each is not None], tensors | ones)


def gradients_of(call, names, expanded):
    """Return the gradients of the sum of all results, from gradients of one value or of many."""
    tensors = tensors_of(call, trained=names)
    results = [each for each in called(call, tensors) if each.grad_fn is not None]
    one = torch.ones(())
    seeds = [one.expand(r.shape) if expanded else torch.ones(r.shape) for r in results]
    trained = [tensors[name] for name in names]
    return torch.autograd.grad(results, trained, seeds, allow_unused=True)


def judge_sum(op, optional):
    """Raise unless ``.sum().backward()`` gives the gradients that contiguous ones give.

    It is the first call of its form, and then a later one.
    """
    call, names = drawn(op, optional)
    for each in (op, op.backward):
        each.routes.clear()
    first = gradients_of(call, names, expanded=True)
    for each in (op, op.backward):
        each.routes.clear()
    for _ in range(3):
        expected = gradients_of(call, names, expanded=False)
    for actual in (first, gradients_of(call, names, expanded=True)):
        for name, ours, theirs in zip(names, actual, expected, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                torch.testing.assert_close(
                    ours, theirs, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                )


@some_calls
def test_the_gradient_of_a_sum(op, optional):
    judge_sum(op, optional)


def turn(pairs):
    """Return the calls whose kernels this run judges; they take turns."""
    first = Sample.day * EMULATED % len(pairs)
    return pairs if Sample.all else [*pairs, *pairs][first : first + EMULATED]


@pytest.mark.parametrize(("op", "optional"), turn(every_call.args[1]))
def test_the_gradient_of_a_sum_by_kernels(op, optional):
    with emulator():
        judge_sum(op, optional)
