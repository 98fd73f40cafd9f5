"""A generation step of one token per row, whose state stays on the device.

On a GPU the first step runs directly, the second is captured into a CUDA graph, and the graph is
launched for every later token: one launch, however many kernels a step has.
"""

from typing import Any

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...errors import DeviceMemoryError
from ...inference.int8_cache import check_latent_options
from ...inference.kv_cache import KVCache
from ...machine import bytes_requested, format_bytes
from ...ops.attention.attention import attention
from ...ops.attention.attention_paged_int8 import attention_paged_int8_forward
from ...ops.attention.kv_append import kv_append_
from ...ops.attention.kv_append_int8 import kv_append_int8_
from ...ops.attention.latent_attention import latent_attention
from ...ops.attention.rope_append import rope_append_
from ...ops.elements.cast import in_dtype
from ...ops.position.rope_qk import rope_qk
from ...parallel.nccl import NcclCommunicator
from ...placement import Arriving, on_gpu_of_attribute, to_device_of
from ...training.captured import Captured, Place
from ..adapters.adapter import DOWN, UP
from ..adapters.joined import join_downs
from ..layers.attending import project_of, whole_of
from ..layers.block import blocks, embedded, inputs_of_layers
from ..layers.call import Attention, Call, Keys, Latents, Mixtures
from ..layers.norms import join
from ..network import Network


@on_gpu_of_attribute("model.table")
class Step:
    """One generation step of a model with its cache; the last token of each row must be real.

    Attributes
    ----------
    chosen : (batch,) int64
        The most likely next tokens, which are the input of the next step; -1 for logits with NaN.
        Only in a ``greedy`` step.
    routes : (batch, layers with experts, k) int32
        The experts that routers chose.  Only if ``notes`` is true.
    """

    def __init__(
        self,
        model: Network,
        cache: KVCache,
        real: Array,
        most: int,
        greedy: bool = False,
        notes: bool = False,
    ) -> None:
        """Start after the cached tokens; ``real``, (batch, tokens), is False at their padding.

        ``most`` is the largest number of tokens in a row.  A ``greedy`` step chooses the next
        tokens.
        """
        self.greedy, self.notes = greedy, notes
        self.chosen: Any = None
        self.routes: Any = None
        self.model, self.cache = model, cache
        self.parameters = model.entered(model.parameters)
        used = model.used(self.parameters, None)
        low = {n: in_dtype(a, model.dtype) for n, a in used.items() if n.endswith((DOWN, UP))}
        self.of_blocks = {**used, **join_downs(low)}  # adapters are rounded once, not in every step
        self.latents: Latents | None = None
        self.whole: dict[str, Any] = {}  # dense kv_b_proj weights, with the adapter merged
        if cache.latent is not None:
            nothing = cache.keys.__getitem__  # no model with an indexer decodes by steps
            self.latents = Latents(lambda layer: False, cache.append, self.attend, nothing)
            names = [name for name in used if name.endswith(".kv_b_proj.weight")]
            self.whole = {name: whole_of(model.adapter)(used, name) for name in names}
        start, sinks = real.shape[1], cache.sinks
        self.tokens = self._placed(np.zeros((len(real), 1)))
        self.positions = self._placed(real.sum(axis=1, keepdims=True))
        self.starts = self._placed(np.full(len(real), start))
        self.rows = self._placed(np.arange(len(real))[:, None])  # a page table of one page per row
        self.tables = {kind: tables(most) for kind, tables in model.tables.items()}
        self.slots = {keys.shape[1]: self._placed(np.arange(keys.shape[1])) for keys in cache.keys}
        self.seen: dict[int, Array] = {}  # slots without padding, by number of slots
        for slots in self.slots if not real.all() else ():
            slot = np.arange(slots)
            last = start - 1 - (start - 1 - slot) % max(1, slots - sinks)
            token = np.where(slot < min(sinks, slots), slot, last)
            not_padding = real[:, np.clip(token, 0, start - 1)] & (token >= 0) & (token < start)
            self.seen[slots] = to_device_of(np.ascontiguousarray(not_padding), model.table)
        self.lengths: dict[int, Array] = {}
        self.captured = Captured(Place())

    @property
    def graph(self) -> Any:
        """The captured graph, launched from the third step on; None without one."""
        return self.captured.graph

    def _placed(self, numbers: Any) -> Array:
        """Return numbers as an int64 array on the device of the model."""
        array: Array = to_device_of(np.asarray(numbers, np.int64), self.model.table)
        return array

    def __call__(self, tokens: Array | None) -> Array:
        """Return the logits after tokens: (batch, vocab).

        ``tokens`` are (batch, 1) on the host.  None: the tokens that a greedy step has chosen,
        which are on the device already.
        """
        self.cache.check_room(1)
        if tokens is not None:
            self.tokens[...] = self._placed(tokens)
        # With expert ranks, the host reads the numbers of rows to send: no graph can capture that.
        directly = type(self.tokens) is np.ndarray or self.model.expert_ranks is not None
        logits = self.run() if directly else self._played()
        self.cache.filled = [filled + 1 for filled in self.cache.filled]
        return logits

    def run(self) -> Array:
        """Run the step and advance by one token, without copies between host and device."""
        model = self.model
        branch = embedded(model.config, self.parameters, self.tokens, model.slices)
        for slots, numbers in self.slots.items():
            self.lengths[slots] = np.minimum(self.starts + 1, slots)
            if slots in self.seen:
                ring = max(1, slots - self.cache.sinks)
                wrapped = (self.starts - self.cache.sinks) % ring + self.cache.sinks
                slot = np.where(self.starts < slots, self.starts, wrapped)
                self.seen[slots] |= numbers == slot[:, None]
        routers = list[Any]() if self.notes else None
        stacks = {} if model.adapter is None else model.adapter.stacks
        call = Call(
            model.config,
            self.of_blocks,
            project_of(model.config, model.adapter, None, model.division, self.tokens),
            Attention(
                self.attend,
                self.tables,
                self.positions,
                Keys(self.turn, self.latents, cached=True),
                whole=lambda _, name: self.whole[name],
                of_chunks=self.attend_in_chunk,
            ),
            Mixtures(stacks, routers, ranks=model.expert_ranks),
            division=model.slices,
        )
        inputs = inputs_of_layers(model.config, self.parameters, self.tokens, branch)
        branch, stream = blocks(call, branch, None, inputs=inputs)
        if routers is not None:
            self.routes = np.stack([each.experts[:, 0] for each in routers], axis=1)
        x = join(call, "model.", model.config.norms.last, branch, stream)[0]
        logits: Array = model.next_logits(self.parameters, x)[:, 0]
        if self.greedy:
            wide = logits.astype(np.float32)
            top = wide.max(axis=-1)  # NaN if any logit is NaN
            self.chosen = np.where(top == top, wide.argmax(axis=-1), -1)  # noqa: PLR0124
            self.tokens[...] = np.maximum(self.chosen, 0)[:, None]
        self.positions += 1
        self.starts += 1
        return logits

    def arriving(self) -> Arriving:
        """Start to copy the chosen tokens to the host."""
        return Arriving(self.chosen)

    def turn(
        self, layer: int, q: Array, k: Array, v: Array, *angles: Array
    ) -> tuple[Array, Array | None]:
        """Return rotated q and k; None for k if the cache already stores k and v."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.cache.scales[layer] is not None:
            return rope_qk(q, k, *angles)
        (cos, sin, positions), sinks = angles, min(self.cache.sinks, keys.shape[1])
        stored = keys, values, self.starts
        return rope_append_(q, k, v, cos, sin, *stored, positions, sinks=sinks)[0], None

    def attend_in_chunk(self, layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
        """Return ``attend`` for keys in the chunk of the query's position."""
        return self.attend(layer, q, k, v, chunk=self.model.config.chunk, **options)

    def attend(
        self, layer: int, q: Array, k: Any, v: Any, chunk: int | None = None, **options: Any
    ) -> Array:
        """Store k and v, and return the attention of q to all slots of the cache with real tokens.

        k is None if ``turn`` has stored it; v is None for a latent cache.  Slots of a window may be
        in any order: the only query attends to all of them.
        """
        cache = self.cache
        keys, values, scales = cache.keys[layer], cache.values[layer], cache.scales[layer]
        slots = keys.shape[1]
        sinks, lengths, seen = min(cache.sinks, slots), self.lengths[slots], self.seen.get(slots)
        options["mask"] = None if seen is None else seen[:, None, None]
        if chunk is not None:
            places = np.arange(slots, like=keys)[None] if seen is None else seen.cumsum(axis=1) - 1
            same = (places // chunk == self.positions // chunk)[:, None, None]
            options["mask"] = same if seen is None else same & options["mask"]
        if cache.latent is not None:
            check_latent_options("Step.attend", options)
            kv_append_(k, k, keys, keys, self.starts, sinks=sinks)
            options = {"rank": cache.latent, "scale": options["scale"], "mask": options["mask"]}
            return latent_attention(q, keys[:, :, 0], lengths, **options)
        options["window"] = None
        if scales is None:
            if k is not None:
                kv_append_(k, v, keys, values, self.starts, sinks=sinks)
            return attention(q, keys, values, key_lengths=lengths, **options)
        kv_append_int8_(k, v, keys, values, scales, starts=self.starts, sinks=sinks)
        stored = keys, values, scales, self.rows
        return attention_paged_int8_forward(q, *stored, lengths, **options)[0]

    def _played(self) -> Array:
        """Run the step on a GPU: directly, then captured into a graph, then by the graph."""
        try:
            logits: Array = self.captured(self.run)
        except MemoryError as error:
            more, (free, whole) = bytes_requested(error), gpu.cupy().cuda.runtime.memGetInfo()
            raise DeviceMemoryError(
                f"generate: a step needs {format_bytes(more)} more, and the GPU has"
                f" {format_bytes(free)} free; generate fewer rows or fewer tokens at a time",
                whole - free + more,
                whole,
            ) from error
        comm = None if self.model.division is None else self.model.division.comm
        if self.graph is not None and isinstance(comm, NcclCommunicator):
            comm.launched("generate")
        return logits
