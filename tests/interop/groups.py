"""Train layers of this library in several processes with torch's DDP and FSDP.

python -m tests.interop.groups RANK WORLD STORE        runs one of WORLD processes
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed.fsdp import fully_shard

import unsloth_cupy as uc

KINDS = ("whole", "shards", "bfloat16")


@contextmanager
def group(store: str, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Initialize torch's process group, whose processes find each other by a file.

    A process that waits 120 seconds for another raises.
    """
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=120), world_size=world, rank=rank
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shard(model: torch.nn.Module, *parts: torch.nn.Module) -> None:
    """Shard the weights of some parts, and all other weights of a model, among all processes."""
    world = torch.distributed.get_world_size()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    for part in (*parts, model):
        fully_shard(part, mesh=mesh)


class Layer(torch.nn.Module):
    """A layer with a norm and a product of this library."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(8, dtype=dtype))
        self.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + uc.linear(uc.rms_norm(x, self.norm), self.weight.T)


def average(kind: str) -> None:
    """Check that the gradients of one row in each process are, on average, those of all rows."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    alone = torch.nn.Sequential(Layer(dtype), Layer(dtype))
    x = torch.arange(32.0, dtype=dtype).reshape(2, 2, 8) - 7
    both = copy.deepcopy(alone)
    both(x).sum().backward()  # a trial run before it is wrapped
    both.zero_grad()
    if kind == "whole":
        both = torch.nn.parallel.DistributedDataParallel(both)
    else:
        shard(both, *both)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    alone(x).square().mean().backward()
    both(x if world == 1 else x[rank]).square().mean().backward()
    for one, mean in zip(alone.parameters(), both.parameters(), strict=True):
        grad = mean.grad if kind == "whole" else mean.grad.full_tensor()
        torch.testing.assert_close(grad, one.grad)


if __name__ == "__main__":
    with group(sys.argv[3], int(sys.argv[1]), int(sys.argv[2])):
        for each in KINDS:
            average(each)
