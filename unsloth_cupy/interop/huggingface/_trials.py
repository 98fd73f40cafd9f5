"""Trials on random numbers: whether a function returns the same as a part of a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..quantized_layers import FOUR, kind_of
from ._changes import Changes

Forward = Callable[..., Any]
MODES = {"training", "gradient_checkpointing"}
SEED = 20  # of a trial's numbers; the caller's generators are not used


def draw(*shape: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return normal random numbers, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(SEED + len(shape) + sum(shape))
    numbers = torch.randn(shape, generator=generator)
    return numbers if like is None else numbers.to(like.device, like.dtype)


def near(result: Any, expected: Any, dtype: torch.dtype) -> bool:
    """Return whether tensors are equal within the precision of a dtype."""
    most = min(16 * torch.finfo(dtype).eps, 0.03)
    pairs = [*zip(tree_leaves(result), tree_leaves(expected), strict=True)]
    tensors = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
    return bool(tensors) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a - b).abs().max() <= most * b.abs().max())
        for a, b in tensors
    )


def agree(
    old: Callable[..., Any], new: Callable[..., Any], sample: Sequence[Any], dtype: torch.dtype
) -> bool:
    """Return whether two functions return the same for the same arguments."""
    try:
        with torch.no_grad():
            return near(new(*sample), old(*sample), dtype)
    except Exception:  # its arguments or results differ
        return False


class Candidate(NamedTuple):
    """Candidates for a forward; a trial calls the module with some parameters replaced."""

    forwards: list[Forward]
    sample: tuple[torch.Tensor, ...]
    parameters: dict[str, torch.Tensor]
    dtype: torch.dtype

    def run(self, module: nn.Module) -> Any:
        """Return the result of a module for the sample."""
        caching: list[Any] = [m for m in module.modules() if hasattr(m, "_cache_clear")]
        try:
            for part in caching:  # peft's, of norms of weights that are replaced here
                part._cache_clear()
            return torch.func.functional_call(module, self.parameters, self.sample)
        finally:
            for part in caching:
                part._cache_clear()


class Refused(Exception):  # noqa: N818  # it leaves this package only as a line of the report
    """The reason why a part is not replaced."""


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Run a block with a model in evaluation mode, without gradients and CPU autocast."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module in modes:
        module.training = kind_of(module) == FOUR  # or bitsandbytes packs weights for some CPUs
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_alone(
    module: nn.Module,
    parts: Iterable[str],
    run: Callable[[], torch.Tensor],
    expected: torch.Tensor,
) -> None:
    """Raise Refused if a module does more than its parts, which a trial at rest does not show.

    Its own weights may be ones or zeros at first, and dropout works only in training.
    """
    others = [child for name, child in module.named_children() if name not in parts]
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(each is not None for each in [*own, *(p for m in others for p in m.parameters())]):
        raise Refused("it has weights besides those of its parts")
    modules = [module, *(inner for child in others for inner in child.modules())]
    kept = [(each, name, vars(each)[name]) for each in modules for name in MODES & {*vars(each)}]
    devices = {p.device for p in module.parameters() if p.is_cuda}
    try:
        for each, name, _ in kept:
            vars(each)[name] = name == "training"
        with torch.random.fork_rng([*devices]):
            result = run()
    finally:
        for each, name, mode in kept:
            vars(each)[name] = mode
    if not near(result, expected, expected.dtype):
        raise Refused("its dropout is not that of a part")


class Texts:
    """Two short texts, the first padded on the left and the second on the right."""

    def __init__(self, model: Any) -> None:
        table = model.get_input_embeddings().weight
        count, device = table.shape[0], table.device
        generator = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(count, (2, 7), generator=generator).to(device)
        self.mask = torch.ones_like(self.tokens)
        self.mask[0, :2] = self.mask[1, -1:] = 0
        self.labels = self.tokens.masked_fill(self.mask == 0, -100)
        self.labels[0, 2] = -100  # padding predicts it

    def run(self, model: Any, **options: Any) -> Any:
        """Return the output of a model for these texts."""
        return model(input_ids=self.tokens, attention_mask=self.mask, use_cache=False, **options)

    def observe(self, model: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, "Call"]:
        """Run a model, and return the last call of each of some modules."""
        calls: dict[nn.Module, Call] = {}

        def note(module: nn.Module, args: Any, options: dict[str, Any], result: Any) -> None:
            calls[module] = Call(args, options, result)

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        try:
            self.run(model)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    @contextmanager
    def held(self, model: Any, module: nn.Module) -> Iterator[None]:
        """Run a block in which a module returns what it returned in one run of the model."""
        changes, calls = Changes(), self.observe(model, [module])
        if module in calls:
            changes.forward(module, lambda *_, **__: calls[module].result)
        try:
            yield
        finally:
            changes.since(0)

    def kept(self, result: Any) -> torch.Tensor:
        """Return the rows of a result, or of its first item, that are not padding."""
        rows: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return rows[self.mask.to(rows.device) == 1]


class Call(NamedTuple):
    """One call of a module: its arguments, its keywords (``options``) and its result."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any

    def again(self, module: nn.Module, **other: Any) -> Any:
        """Call the module once more, with some keywords replaced."""
        return module(*self.args, **(self.options | other))

    def wide(self, module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Any:
        """Call the module once more in float32, with some parameters replaced."""
        weights = {name: _wide(weight) for name, weight in module.named_parameters()}
        weights |= {name: new.to(weights[name].device) for name, new in parameters.items()}
        args, options = tree_map(_wide, (self.args, self.options))
        return torch.func.functional_call(module, weights, args, options)


def _wide(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floats else value
