"""Causal attention with grouped heads, its gradients, and a row that attends to no key."""

import numpy as np

from unsloth_cupy import Tape, attention

rng = np.random.default_rng(0)
tape = Tape()
q = tape.watch(rng.standard_normal((2, 6, 4, 16), np.float32))  # batch, queries, heads, dim
k = tape.watch(rng.standard_normal((2, 6, 2, 16), np.float32))  # two query heads per KV head
v = tape.watch(rng.standard_normal((2, 6, 2, 16), np.float32))

out = attention(q, k, v, causal=True, window=(3, 0), softcap=30.0)
dq, dk, dv = tape.gradients(out, [q, k, v], dy=np.ones(out.shape, np.float32))
print("out", out.shape, "dq", dq.shape, "dk", dk.shape, "dv", dv.shape)

mask = np.zeros((6, 6), bool)  # True: may attend
masked = attention(q.value, k.value, v.value, mask=mask)
print("a row that attends to no key gives", masked.min(), masked.max())
