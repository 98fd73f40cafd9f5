"""Attention as transformers' AttentionInterface asks for it, and masks that stay small.

Where a mask is causal, a window of the config or texts that are packed, layers get which keys are
no padding, (batch, keys), or where packed texts begin, (texts + 1,).  All else, such as images
whose tokens see each other, is the mask that transformers makes, (batch, 1, queries, keys).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..torch import attention as attend
from ..torch import attention_varlen
from ._changes import Changes
from ._trials import Refused, Texts, near

NAME = "unsloth_cupy"
notes: list[tuple[Any, ...]] | None = None  # of a trial


def attention(
    module: Any, query: Any, key: Any, value: Any, seen: Any, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None,
    position_bias: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Return what heads see, (batch, tokens, heads, dim)."""
    if notes is not None:
        notes.append(("attention", module, seen, sliding_window))
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout:  # drawn from torch's generator on the host, which checkpointing winds back
        options |= {"dropout": dropout, "seed": torch.randint(2**62, ())}
    if position_bias is not None:
        options["bias"] = position_bias
    if seen is not None and seen.ndim == 4:  # says everything
        return attend(q, k, v, **_whole(seen, options)), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = sliding_window and sliding_window - 1  # it counts the query itself
    options |= {
        "causal": causal,
        "window": (side, 0 if causal else side) if sliding_window else None,
    }
    if seen is None:
        return attend(q, k, v, **options), None
    if seen.ndim == 1:  # texts lie end to end
        flat = (a.flatten(0, 1) for a in (q, k, v))
        return attention_varlen(*flat, seen, seen, **options).view(*q.shape[:3], v.shape[-1]), None
    count = seen.shape[1]  # what a static cache holds after these keys is not there yet
    return attend(q, k[:, :count], v[:, :count], mask=seen[:, None, None], **options), None


def _whole(seen: Any, options: dict[str, Any]) -> dict[str, Any]:
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
    """Return what layers must know of a mask."""
    queries = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:  # transformers before 5.5
        queries = {"cache_position": cache_position}
        q_length, q_offset = len(cache_position), cache_position[0]
        device = cache_position.device
    window = getattr(config, "sliding_window", None)
    end = _end(q_offset, q_length) if allow_is_causal_skip else None
    # All texts lie in the first chunk, where a mask is one of chunks.
    first = (
        end is not None and local_size is not None and local_size != window and end <= local_size
    )
    plain = local_size is None or local_size == window or first
    square = attention_mask is None and 1 < q_length == kv_length and not use_vmap
    if plain and end is not None and end <= kv_offset + kv_length:
        made = _padding(attention_mask, batch_size, kv_offset, end, kv_length, device)
    elif square and ((allow_is_causal_skip and not plain) or _packed(mask_function, options)):
        made = _starts(mask_function, batch_size, q_length, device)
    else:
        made = sdpa_mask(
            batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
            use_vmap=use_vmap, **queries, **options,
        )  # fmt: skip
    if notes is not None:
        notes.append(("mask", made, window if local_size == window else None))
    return made


def _end(q_offset: Any, q_length: int) -> int | None:
    """Return the position after the last query, or None where a graph does not know it."""
    if isinstance(q_offset, torch.Tensor):
        if torch.compiler.is_compiling() or q_length == 1:
            return None
        q_offset = int(q_offset)
    return q_offset + q_length


def _padding(mask: Any, batch: int, start: int, end: int, keys: int, device: Any) -> Any:
    """Return which of the keys from start to end are no padding; None where all are to be seen."""
    if mask is None:
        if end == start + keys:
            return None
        return torch.ones(batch, end - start, dtype=torch.bool, device=device)
    if mask.shape[1] < end:
        mask = pad(mask, (0, end - mask.shape[1]))
    return mask[:, start:end]


def _packed(function: Any, options: dict[str, Any]) -> bool:
    """Say whether a mask is one of packed texts, causal or with a window inside of each."""
    return function.__name__ == "and_mask" and "allow_is_bidirectional_skip" not in options


def _starts(function: Any, batch: int, tokens: int, device: Any) -> Any:
    """Return where texts begin that lie end to end: at tokens that do not see the one before."""
    row, token = torch.arange(batch, device=device), torch.arange(tokens, device=device)
    sees = function(row[:, None], row[:1, None], token[None], token[None] - 1)
    starts = ~sees.expand(batch, tokens) | (token == 0)
    total = batch * tokens
    places = torch.arange(total, device=device)
    if torch.compiler.is_compiling():  # one size for all batches: texts without tokens follow
        found = torch.where(starts.flatten(), places, total).sort().values
    else:
        found = places[starts.flatten()]
    return pad(found, (0, 1), value=total).to(torch.int32)


def take(changes: Changes, model: Any, texts: Texts) -> None:
    """Let the layers of a model's decoder attend here; raise Refused where one does more."""
    for config in _configs(model):
        changes.set(config, "_attn_implementation_internal", NAME)
    with _noting() as noted:
        texts.run(model)
    made = {id(seen): (seen, size) for kind, seen, size, *_ in noted if kind == "mask"}
    called = {note[1]: note[2:] for note in noted if note[0] == "attention"}
    if not called:
        raise Refused("it does not ask the AttentionInterface")
    for module, (seen, window) in called.items():
        if id(seen) not in made:
            raise Refused(f"{type(module).__name__} gets a mask that is not the interface's")
        if seen.ndim < 4 and made[id(seen)][1] != window:
            raise Refused(f"{type(module).__name__} does not say which window it has")
    ours = changes[-len(_configs(model)) :]
    for owner, name, _, before in ours:
        vars(owner)[name] = before
    calls = texts.observe(model, called)
    for owner, name, now, _ in ours:
        vars(owner)[name] = now
    for module, call in calls.items():
        if "attention_mask" not in call.given:
            raise Refused(f"{type(module).__name__} takes its mask by another name")
        found = texts.kept(call.again(module, attention_mask=called[module][0]))
        if not near(found, texts.kept(call.found), model.dtype):
            raise Refused(f"{type(module).__name__} does more than the interface says")


@contextmanager
def _noting() -> Iterator[list[tuple[Any, ...]]]:
    global notes  # noqa: PLW0603  # transformers calls two functions, which know no model
    notes = []
    try:
        yield notes
    finally:
        notes = None


def _configs(model: Any) -> list[Any]:
    """Return the configs that say how the layers of a decoder attend."""
    decoder = model.get_decoder() or model
    found = [getattr(module, "config", None) for module in decoder.modules()]
    return [*{id(config): config for config in found if config is not None}.values()]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
