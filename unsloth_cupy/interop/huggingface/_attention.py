"""Attention for transformers' AttentionInterface, with compact masks.

If a mask is causal, has the window of the config, or separates packed texts, layers get only which
keys are not padding, (batch, keys), or the starts of the packed texts, (texts + 1,).  Any other
mask, for example of images whose tokens see each other, is the full mask of transformers,
(batch, 1, queries, keys).  A decoder that slices masks by queries, as one whose last layers share
keys and values does for the logits of few tokens, gets (batch, 1, 1, keys) in uint8 in place of
(batch, keys), and full masks of packed texts.

In models that have eager attention alone, a row that sees no key gets the mean of all values, as
eager gives it; in others it gets zeros, as sdpa gives it.  Where weights are asked for, a layer's
own eager function returns them.
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

NAME, EAGER = "unsloth_cupy", "unsloth_cupy_eager"  # in place of sdpa and others, and of eager
SLICED = "_sliced"  # added to both for decoders that slice masks by queries
notes: list[tuple[Any, ...]] | None = None  # records the calls of a trial; None outside of one


def attention(
    module: Any, query: Any, key: Any, value: Any, seen: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the attention of each head, (batch, tokens, heads, dim), and its weights or None.

    ``seen`` is a mask that ``mask`` returned.
    """
    if notes is not None:
        notes.append(("attention", module, seen, options.get("sliding_window")))
    if seen is not None and seen.dtype is torch.uint8:
        seen = seen[:, 0, 0].bool()
    eager = is_eager(module.config)
    asked = options.get("output_attentions") or getattr(module.config, "output_attentions", False)
    if eager and asked:
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
    """Return the attention of each head; ``eager`` for rows that see no key as eager gives them."""
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:  # seed from torch's generator on the host, which checkpointing restores
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
        flat = (a.flatten(0, 1) for a in (q, k, v))
        return attention_varlen(*flat, seen, seen, **options).view(*q.shape[:3], v.shape[-1])
    if seen.ndim == 4:
        options = _with_mask(seen, options)
    else:
        k = k[:, : seen.shape[1]]  # a static cache has more keys, which are not written yet
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
    """Return a mask that ``mask`` returned as what eager attention adds, queries x keys."""
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
    """Return options with a full mask, as a boolean mask or added to the bias."""
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
    """Return the mask that layers get: None, compact or full, as the module's docstring says."""
    queries = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:  # transformers before 5.5
        queries = {"cache_position": cache_position}
        q_length, q_offset = len(cache_position), cache_position[0]
        device = cache_position.device
    window = getattr(config, "sliding_window", None)
    end = _end(q_offset, q_length) if allow_is_causal_skip else None
    # with chunked attention: all tokens are in the first chunk
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
    """Return the mask that layers get if the decoder slices it by queries: None or of 4 axes."""
    seen = mask(*args, **options)
    if seen is not None and seen.ndim == 1:
        seen = sdpa_mask(*args, **options | {"allow_is_causal_skip": False})
    elif seen is not None and seen.ndim == 2:
        seen = seen[:, None, None].to(torch.uint8)
    if notes is not None:
        notes[-1] = ("mask", seen, notes[-1][2])
    return seen


def is_eager(config: Any) -> bool:
    """Return whether this attention is in place of eager attention."""
    return str(config._attn_implementation).startswith(EAGER)


def _end(q_offset: Any, q_length: int) -> int | None:
    """Return the position after the last query, or None if it is not known in a graph."""
    if isinstance(q_offset, torch.Tensor):
        if torch.compiler.is_compiling() or q_length == 1:
            return None
        q_offset = int(q_offset)
    return q_offset + q_length


def _padding(mask: Any, batch: int, start: int, end: int, keys: int, device: Any) -> Any:
    """Return which keys from start to end are not padding; None if all of them are seen."""
    if mask is None:
        if end == start + keys:
            return None
        return torch.ones(batch, end - start, dtype=torch.bool, device=device)
    if mask.shape[1] < end:
        mask = pad(mask, (0, end - mask.shape[1]))
    return mask[:, start:end]


def _packed(function: Any, options: dict[str, Any]) -> bool:
    """Return whether a mask is one of packed texts, each causal or with a window."""
    return function.__name__ == "and_mask" and "allow_is_bidirectional_skip" not in options


def _starts(function: Any, batch: int, tokens: int, device: Any) -> Any:
    """Return the starts of packed texts (tokens that do not see the previous one) and the end."""
    row, token = torch.arange(batch, device=device), torch.arange(tokens, device=device)
    sees = function(row[:, None], row[:1, None], token[None], token[None] - 1)
    starts = ~sees.expand(batch, tokens) | (token == 0)
    total = batch * tokens
    places = torch.arange(total, device=device)
    if torch.compiler.is_compiling():  # a fixed size for all batches: empty texts at the end
        starts_at = torch.where(starts.flatten(), places, total).sort().values
    else:
        starts_at = places[starts.flatten()]
    return pad(starts_at, (0, 1), value=total).to(torch.int32)


def take(changes: Changes, model: Any, texts: Texts) -> None:
    """Let the layers of a model's decoder use this attention; raise Refused if one differs."""
    count = len(changes)
    try:
        _take(changes, model, texts, "")
    except IndexError:  # masks have fewer axes than the decoder slices
        changes.since(count)
        _take(changes, model, texts, SLICED)


def _take(changes: Changes, model: Any, texts: Texts, form: str) -> None:
    """Replace the attention, with one of both forms of masks."""
    decoder = model.get_decoder() or model
    for config in _configs(decoder):
        eager = config._attn_implementation == "eager"
        if eager and getattr(decoder, "_supports_sdpa", False):
            cure = 'set_attn_implementation("sdpa") before patch has it replaced'
            raise Refused(f"its config asks for eager attention, which returns weights; {cure}")
        changes.set(config, IMPLEMENTATION, (EAGER if eager else NAME) + form)
    with _noting() as noted:
        texts.run(model)
    masks = {_key(seen): (seen, size) for kind, seen, size, *_ in noted if kind == "mask"}
    called = {note[1]: note[2:] for note in noted if note[0] == "attention"}
    if not called:
        raise Refused("it does not use the AttentionInterface")
    for module, (seen, window) in called.items():
        if _key(seen) not in masks:
            raise Refused(f"{type(module).__name__} gets a mask that is not the interface's")
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
            raise Refused(f"{type(module).__name__} takes its mask by another name")
        result = texts.kept(call.again(module, attention_mask=called[module][0]))
        if not near(result, texts.kept(call.result), model.dtype):
            raise Refused(f"{type(module).__name__} does more than the interface specifies")


def _key(seen: Any) -> int:
    """Return what identifies a mask, and a slice of one that has 4 axes."""
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
