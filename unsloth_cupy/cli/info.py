"""``unsloth-cupy info``: shows devices, installed versions, and where ops run."""

import platform

import click

from .. import machine
from .._version import __version__
from ..core import source
from ..core.op import OPS
from ..kernel_cache import kernel_cache
from ..machine import format_bytes, machine_memory
from .options import json_option

LIBRARIES = {
    "cupy": machine.CUPY,
    **{
        name: (name,)
        for name in (
            "numpy", "scipy", "ml_dtypes", "safetensors", "click", "rich", "tqdm", "threadpoolctl",
            "tokenizers", "matplotlib", "torch", "jax",
        )
    },
}  # fmt: skip


@click.command()
@json_option
def info() -> None:
    """Show devices, versions, and where ops will run."""
    from rich.table import Table

    gpus, reason = machine.gpus()
    memory = machine_memory()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("unsloth_cupy", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.platform()}")
    table.add_row(
        "CPU",
        f"{machine.cores()} cores, {format_bytes(memory) if memory else 'unknown'} of memory,"
        f" matrix products by {machine.blas()}",
    )
    for i, gpu in enumerate(gpus):
        table.add_row(
            f"GPU {i}",
            f"{gpu.name}, {format_bytes(gpu.memory)}, compute capability {gpu.capability}",
        )
    if not gpus:
        table.add_row("GPU", f"none ({reason})")
    table.add_row("", "")
    versions = {name: machine.version(*names) for name, names in LIBRARIES.items()}
    table.add_row("installed", ", ".join(f"{n} {v}" for n, v in versions.items() if v))
    table.add_row("not installed", ", ".join(n for n, v in versions.items() if not v) or "-")
    table.add_row("", "")
    fast = sum(op.launch is not None for op in OPS.values())
    table.add_row("NumPy arrays", "run the NumPy definitions on the CPU")
    if gpus:
        table.add_row(
            "CuPy arrays",
            f"run CUDA kernels for {fast} of {len(OPS)} ops in float16, bfloat16 and float32;"
            " the definitions on the GPU for the others",
        )
        table.add_row("kernel cache", str(kernel_cache()))
    else:
        table.add_row(
            "CuPy arrays", "need a GPU and pip install 'unsloth_cupy[cuda12]' or [cuda13]"
        )
    table.add_row("kernel sources", str(source.source_root()))
    machine.console(markup=False).print(table)
