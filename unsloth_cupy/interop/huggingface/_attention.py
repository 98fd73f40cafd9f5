"""Attention for transformers' AttentionInterface, with compact masks.

If a mask is causal, has the window of the config, or separates packed texts, layers get a compact
mask:

    (batch, keys)                   False for padding
    (texts + 1,)                    the starts of packed texts, and the end
    (batch, 1, 1, keys) uint8       0 for padding, for decoders that slice masks by queries: their
                                    last layers share keys and values, and compute few tokens

For any other mask, for example of images whose tokens attend to each other, and for packed texts in
decoders that slice masks, layers get transformers' full mask, (batch, 1, queries, keys).

A row without a visible key gets the mean of all values in models that only have eager attention, as
from eager attention, and zeros in other models, as from sdpa.  If a call requests attention
weights, the layer's own eager function returns them.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..torch import attention as attend
from ..torch import attention_forward, attention_varlen
from ._changes import IMPLEMENTATION, Changes
from ._trials import Refused, Texts, near

# names in the interface: instead of sdpa and others, and instead of eager attention
NAME, EAGER = "unsloth_cupy", "unsloth_cupy_eager"
SLICED = "_sliced"  # suffix of both names for decoders that slice masks by queries
notes: list[tuple[Any, ...]] | None = None  # the calls of a trial; None outside a trial


def attention(
    module: Any, query: Any, key: Any, value: Any, seen: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the attention of each head, (batch, tokens, heads, dim), and its weights or None.

    ``seen`` is a mask from ``mask``.
    """
    if notes is not None:
        notes.append(("attention", module, seen, options.get("sliding_window")))
    if seen is not None and seen.dtype is torch.uint8:
        seen = seen[:, 0, 0].bool()
    eager = is_eager(module.config)
    needs_weights = options.get("output_attentions") or getattr(
        module.config, "output_attentions", False
    )
    if eager and needs_weights:
        own = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        added = _added(module, query, key, seen, **options)
        result: tuple[Any, Any] = own(module, query, key, value, added, **options)
        return result
    return _attended(module, query, key, value, seen, eager, **options), None


def _attended(
    module: Any, query: Any, key: Any, value: Any, seen: Any, eager: bool, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None,
    position_bias: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """Return the attention of each head; ``eager``: rows without keys get the mean of values."""
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))  # (batch, tokens, heads, dim)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:  # a seed from torch's generator on the host, which checkpointing restores
        options |= {"dropout": dropout, "seed": torch.randint(2**62, ())}
    if position_bias is not None:
        options["bias"] = position_bias
    if seen is None or seen.ndim < 4:  # a full mask includes causality and windows
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        side = sliding_window and sliding_window - 1  # sliding_window includes the query itself
        options |= {
            "causal": causal,
            "window": (side, 0 if causal else side) if sliding_window else None,
        }
    if seen is None:
        return attend(q, k, v, **options)
    if seen.ndim == 1:  # starts of packed texts
        flat = (a.flatten(0, 1) for a in (q, k, v))  # (batch * tokens, heads, dim)
        return attention_varlen(*flat, seen, seen, **options).view(*q.shape[:3], v.shape[-1])
    if seen.ndim == 4:
        options = _with_mask(seen, options)
    else:
        k = k[:, : seen.shape[1]]  # a static cache has further keys, which are not written yet
        options["mask"] = seen[:, None, None]
    if not eager:
        return attend(q, k, v[:, : k.shape[1]], **options)
    out, lse = attention_forward(q, k, v[:, : k.shape[1]], **options)
    mean = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.where(lse.isneginf().transpose(1, 2)[..., None], mean, out)


def _added(
    module: Any, query: Any, key: Any, seen: Any, *,
    sliding_window: int | None = None, is_causal: bool | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Return a mask from ``mask`` as numbers to add to scores, (..., queries, keys)."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    if seen is None or seen.ndim < 4:
        end = seen.shape[1] if seen is not None and seen.ndim == 2 else keys
        place = torch.arange(keys, device=device)
        behind = torch.arange(end - queries, end, device=device)[:, None] - place
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        sees = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        if sliding_window:
            sees = sees & (behind.abs() < sliding_window)
        if seen is not None and seen.ndim == 1:
            places = torch.arange(len(query) * queries, dtype=seen.dtype, device=device)
            text = torch.searchsorted(seen, places, right=True).view(-1, 1, queries)
            sees = sees & (text[..., None] == text[:, :, None])
        elif seen is not None:
            sees = sees & pad(seen, (0, keys - end))[:, None, None].bool()
    else:
        sees = seen
    if sees.dtype is not torch.bool:
        return sees
    zero = torch.zeros((), dtype=query.dtype, device=device)
    return torch.where(sees, zero, torch.finfo(query.dtype).min)


def _with_mask(seen: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a full mask: as ``mask`` if it is boolean, else added to ``bias``."""
    if seen.dtype is torch.bool:
        return options | {"mask": seen}
    bias = options.get("bias")
    return options | {"bias": seen if bias is None else bias + seen}


def mask(
    batch_size: int, q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Any = causal_mask_function, attention_mask: Any = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, use_vmap: bool = False,
    device: Any = "cpu", config: Any = None, cache_position: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Return the mask for layers: None, compact or full, as the module's docstring describes."""
    queries = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:  # transformers before 5.5
        queries = {"cache_position": cache_position}
        q_length, q_offset = len(cache_position), cache_position[0]
        device = cache_position.device
    window = getattr(config, "sliding_window", None)
    end = _end(q_offset, q_length) if allow_is_causal_skip else None
    # chunked attention is causal if all tokens are in the first chunk
    first_chunk = (
        end is not None and local_size is not None and local_size != window and end <= local_size
    )
    plain = local_size is None or local_size == window or first_chunk
    square = attention_mask is None and 1 < q_length == kv_length and not use_vmap
    if plain and end is not None and end <= kv_offset + kv_length:
        seen = _padding(attention_mask, batch_size, kv_offset, end, kv_length, device)
    elif square and ((allow_is_causal_skip and not plain) or _packed(mask_function, options)):
        seen = _starts(mask_function, batch_size, q_length, device)
    else:
        seen = sdpa_mask(
            batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
            use_vmap=use_vmap, **queries, **options,
        )  # fmt: skip
    if notes is not None:
        notes.append(("mask", seen, window if local_size == window else None))
    return seen


def sliced_mask(*args: Any, **options: Any) -> Any:
    """Return the mask for layers of a decoder that slices it by queries: None, or 4 axes."""
    seen = mask(*args, **options)
    if seen is not None and seen.ndim == 1:
        seen = sdpa_mask(*args, **options | {"allow_is_causal_skip": False})
    elif seen is not None and seen.ndim == 2:
        seen = seen[:, None, None].to(torch.uint8)
    if notes is not None:
        notes[-1] = ("mask", seen, notes[-1][2])
    return seen


def is_eager(config: Any) -> bool:
    """Return whether this attention replaces eager attention."""
    return str(config._attn_implementation).startswith(EAGER)


def _end(q_offset: Any, q_length: int) -> int | None:
    """Return the position after the last query; None if a graph does not know it."""
    if isinstance(q_offset, torch.Tensor):
        if torch.compiler.is_compiling() or q_length == 1:
            return None
        q_offset = int(q_offset)
    return q_offset + q_length


def _padding(mask: Any, batch: int, start: int, end: int, keys: int, device: Any) -> Any:
    """Return a mask of the keys start .. end, False for padding; None if all keys are visible."""
    if mask is None:
        if end == start + keys:
            return None
        return torch.ones(batch, end - start, dtype=torch.bool, device=device)
    if mask.shape[1] < end:
        mask = pad(mask, (0, end - mask.shape[1]))
    return mask[:, start:end]


def _packed(function: Any, options: dict[str, Any]) -> bool:
    """Return whether a mask is for packed texts, each causal or with a window."""
    return function.__name__ == "and_mask" and "allow_is_bidirectional_skip" not in options


def _starts(function: Any, batch: int, tokens: int, device: Any) -> Any:
    """Return the starts of packed texts, and the end.

    A token starts a text if it does not attend to the token before it.
    """
    row, token = torch.arange(batch, device=device), torch.arange(tokens, device=device)
    sees = function(row[:, None], row[:1, None], token[None], token[None] - 1)
    starts = ~sees.expand(batch, tokens) | (token == 0)
    total = batch * tokens
    places = torch.arange(total, device=device)
    if torch.compiler.is_compiling():  # a fixed size for all batches, with empty texts at the end
        starts_at = torch.where(starts.flatten(), places, total).sort().values
    else:
        starts_at = places[starts.flatten()]
    return pad(starts_at, (0, 1), value=total).to(torch.int32)


def take(changes: Changes, model: Any, texts: Texts) -> None:
    """Make the layers of a model's decoder use this attention; raise Refused if one differs."""
    count = len(changes)
    try:
        _take(changes, model, texts, "")
    except IndexError:  # the decoder slices axes that compact masks do not have
        changes.since(count)
        _take(changes, model, texts, SLICED)


def _take(changes: Changes, model: Any, texts: Texts, form: str) -> None:
    """Replace the attention, with the masks of ``mask`` ("") or ``sliced_mask`` (SLICED)."""
    decoder = model.get_decoder() or model
    for config in _configs(decoder):
        eager = config._attn_implementation == "eager"
        if eager and getattr(decoder, "_supports_sdpa", False):
            cure = 'call set_attn_implementation("sdpa") before patch'
            raise Refused(f"its config selects eager attention, which returns weights; {cure}")
        changes.set(config, IMPLEMENTATION, (EAGER if eager else NAME) + form)
    with _noting() as noted:
        texts.run(model)
    masks = {_key(seen): (seen, size) for kind, seen, size, *_ in noted if kind == "mask"}
    called = {note[1]: note[2:] for note in noted if note[0] == "attention"}
    if not called:
        raise Refused("it does not use the AttentionInterface")
    for module, (seen, window) in called.items():
        if _key(seen) not in masks:
            raise Refused(f"{type(module).__name__} gets a mask from outside the interface")
        compact = seen.ndim < 4 or seen.dtype is torch.uint8
        if compact and masks[_key(seen)][1] != window:
            raise Refused(f"{type(module).__name__} does not pass the window of its mask")
    ours = changes[-len(_configs(decoder)) :]
    for owner, name, _, before in ours:
        vars(owner)[name] = before
    calls = texts.observe(model, called)
    for owner, name, now, _ in ours:
        vars(owner)[name] = now
    for module, call in calls.items():
        if "attention_mask" not in call.options:
            raise Refused(f"{type(module).__name__} has another name for its mask")
        result = texts.kept(call.again(module, attention_mask=called[module][0]))
        if not near(result, texts.kept(call.result), model.dtype):
            raise Refused(f"{type(module).__name__} does more than the interface specifies")


def _key(seen: Any) -> int:
    """Return a key of a mask; a slice of a mask with 4 axes has the key of the whole mask."""
    whole = seen is None or seen.ndim < 4
    return id(seen) if whole else int(seen.untyped_storage().data_ptr())


@contextmanager
def _noting() -> Iterator[list[tuple[Any, ...]]]:
    """Yield a list to which ``attention`` and ``mask`` add their calls inside the block."""
    global notes  # noqa: PLW0603  # transformers calls both functions without a model
    notes = []
    try:
        yield notes
    finally:
        notes = None


def _configs(decoder: Any) -> list[Any]:
    """Return the configs that select the attention of a decoder's layers."""
    configs = [getattr(module, "config", None) for module in decoder.modules()]
    return [*{id(config): config for config in configs if config is not None}.values()]


for name in (NAME, EAGER):
    for form, function in (("", mask), (SLICED, sliced_mask)):
        AttentionInterface.register(name + form, attention)
        AttentionMaskInterface.register(name + form, function)
