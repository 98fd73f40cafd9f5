"""Make the golden steps of bitsandbytes' 8-bit AdamW: ``python -m tests.golden.generate_adamw8``.

Needs torch and bitsandbytes 0.50.2.  Its CPU code looks nearest codes up in 65,536 shares of
-1 .. 1, which is coarser than the codes near 0; of float64 values it takes the nearest code, as its
CUDA code does.  So the averages of these steps are quantized from float64.  Squares below 1e-4 of
their scale are rounded up: bitsandbytes rounds small ones to 0, and then divides by eps.
"""

from pathlib import Path
from typing import Any

import numpy as np

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SIZE, STEPS = 4200, 4  # 16 blocks of 256 and a part of one


def main() -> None:
    """Write ops/adamw8.npz: maps, start, gradients; after each step parameter, codes, absmax."""
    import torch
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.functional import create_dynamic_map
    from bitsandbytes.optim import AdamW8bit

    def quantize(values: Any, code: Any, scale: Any, codes: Any, block: int) -> None:
        quantized, largest = torch.ops.bitsandbytes.quantize_blockwise(values.double(), code, block)
        if code[0] == 0:  # the map of squares
            shares = values.double() / largest.repeat_interleave(block)[: values.numel()]
            decoded = code[quantized.long()].double()
            up = (decoded < 1e-4) & (shares > decoded * (1 + 1e-5))
            quantized = torch.where(up, quantized + 1, quantized)
        codes.copy_(quantized)
        scale.copy_(largest)

    ops._quant_blockwise_fp32_direct = quantize
    rng = np.random.default_rng(0)
    start = rng.standard_normal(SIZE).astype(np.float16)
    sizes = 10.0 ** rng.integers(-4, 1, (STEPS, SIZE))
    gradients = (rng.standard_normal((STEPS, SIZE)) * sizes).astype(np.float16)
    parameter = torch.nn.Parameter(torch.tensor(start.astype(np.float32)))
    optimizer = AdamW8bit([parameter], **OPTIONS)
    kept: dict[str, list[Any]] = {name: [] for name in ("parameter", "state1", "state2")}
    kept |= {"absmax1": [], "absmax2": []}
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient.astype(np.float32))
        optimizer.step()
        state = optimizer.state[parameter]
        for name, values in kept.items():
            tensor = parameter.detach() if name == "parameter" else state[name]
            values.append(tensor.numpy().copy())
    np.savez_compressed(
        Path(__file__).parent / "ops/adamw8.npz",
        signed_map=create_dynamic_map(True).numpy(),
        unsigned_map=create_dynamic_map(False).numpy(),
        start=start,
        gradients=gradients,
        **{name: np.stack(values) for name, values in kept.items()},
    )


if __name__ == "__main__":
    main()
