"""Trials on random numbers, which compare a function with a part of a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..quantized_layers import FOUR, kind_of
from ._changes import Changes

Forward = Callable[..., Any]
MODES = {"training", "gradient_checkpointing"}  # attributes that change a module's forward
SEED = 20  # seed of the numbers of trials; the generators of the caller stay as they are


def draw(*shape: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return normal random numbers, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(SEED + len(shape) + sum(shape))
    numbers = torch.randn(shape, generator=generator)
    return numbers if like is None else numbers.to(like.device, like.dtype)


def near(result: Any, expected: Any, dtype: torch.dtype) -> bool:
    """Return whether tensors are equal within the precision of a dtype."""
    # 16 roundings; for bfloat16, whose eps is 2^-7, at most 3 %
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
    """Return whether two functions have the same results for the same arguments."""
    try:
        with torch.no_grad():
            return near(new(*sample), old(*sample), dtype)
    except Exception:  # the functions differ in arguments or results
        return False


class Candidate(NamedTuple):
    """Candidates for the forward of a module, and the arguments of the trial that compares them."""

    forwards: list[Forward]
    sample: tuple[torch.Tensor, ...]  # arguments of the module
    parameters: dict[str, torch.Tensor]  # random parameters in place of the module's
    dtype: torch.dtype  # whose precision results must have

    def run(self, module: nn.Module) -> Any:
        """Return the result of a module for the sample."""
        caching: list[Any] = [m for m in module.modules() if hasattr(m, "_cache_clear")]
        try:
            for part in caching:  # peft caches norms of weights, which are replaced here
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
        # in evaluation mode, bitsandbytes packs 4-bit weights for some CPUs
        module.training = kind_of(module) == FOUR
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
    """Raise Refused if a module does more than its parts.

    A trial ``at_rest`` does not show that: weights besides those of the parts may be ones or zeros
    at first, and dropout is active only in training.
    """
    others = [child for name, child in module.named_children() if name not in parts]
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(each is not None for each in [*own, *(p for m in others for p in m.parameters())]):
        raise Refused("it has weights besides the weights of its parts")
    modules = [module, *(inner for child in others for inner in child.modules())]
    modes = [(each, name, vars(each)[name]) for each in modules for name in MODES & {*vars(each)}]
    devices = {p.device for p in module.parameters() if p.is_cuda}
    try:
        for each, name, _ in modes:
            vars(each)[name] = name == "training"
        with torch.random.fork_rng([*devices]):
            result = run()
    finally:
        for each, name, mode in modes:
            vars(each)[name] = mode
    if not near(result, expected, expected.dtype):
        raise Refused("it has dropout of its own")


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
        self.labels[0, 2] = -100  # the first token after padding, which padding would predict

    def run(self, model: Any, **options: Any) -> Any:
        """Return the output of a model for these texts."""
        return model(input_ids=self.tokens, attention_mask=self.mask, use_cache=False, **options)

    def observe(self, model: Any, modules: Iterable[nn.Module]) -> dict[nn.Module, "Call"]:
        """Run a model; return the last call of each of these modules."""
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
        """Run a block in which a module returns its result of one run of the model."""
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
    """A call of a module: arguments, keywords (``options``) and result."""

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
    """Return a float tensor in float32, any other value as it is."""
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floats else value
