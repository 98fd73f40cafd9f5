"""Train in two processes, each with half of every batch: the loss equals that of one process.

python docs/examples/two_ranks.py                              starts both ranks
torchrun --nproc-per-node 2 docs/examples/two_ranks.py         the same, with torchrun
"""

import os
import socket
import subprocess
import sys

import numpy as np

from unsloth_cupy import AdamW, models
from unsloth_cupy.parallel import DataParallel, SocketCommunicator, Zero1, part

if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | place | {"WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    sys.exit(max(process.wait() for process in ranks))

config = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
comm = SocketCommunicator.from_environment()
rng = np.random.default_rng(0)  # the same numbers in both processes
model = models.create(config, seed=0)
parallel = DataParallel(model, comm)
optimizer = Zero1(AdamW(model.parameters, lr=0.01, weight_decay=0.0), comm)
rows = (np.arange(8)[:, None] + np.arange(12)) % 16
expected = model.loss(rows, rows)
loss, _ = parallel.loss_and_gradients(rows[part(8, comm)], rows[part(8, comm)])
if comm.rank == 0:
    print(f"loss of one process: {expected:.4f}, of {comm.size} ranks: {loss:.4f}")

for step in range(40):
    tokens = (rng.integers(0, 16, (8, 1)) + np.arange(12)) % 16
    own = tokens[part(8, comm)]  # this rank's rows
    loss, gradients = parallel.loss_and_gradients(own, own)
    optimizer.step(gradients)
    if comm.rank == 0 and step % 10 == 0:
        print(f"step {step:2}  loss {loss:.3f}")
held = sum(array.nbytes for array in optimizer.state().values())
if comm.rank == 0:
    print(f"step 40  loss {loss:.3f}; each rank has half of the moments, {held:,} bytes in total")
