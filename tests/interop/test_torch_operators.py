"""Ops as operators of torch: what its own checks, compilers and transforms say."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

from unsloth_cupy.interop import torch as door  # noqa: E402

from .calls import drawn, every_call  # noqa: E402


@every_call
def test_torch_finds_no_fault(op, optional):
    call, names = drawn(op, optional)
    tensors = {n: a if a is None else torch.from_numpy(a) for n, a in call.arrays.items()}
    for name in names:
        tensors[name].requires_grad_()
    operator = door.entered[op]
    arguments = [tensors.get(name) for name in operator.tensors]
    for name, codec in operator.codecs.items():
        value = call.options[name]
        arguments.append(value if codec.encode is None else codec.encode(value))
    torch.library.opcheck(operator.door, tuple(arguments))
    assert np.isfinite(call.run()[operator.results[0]]).all()
