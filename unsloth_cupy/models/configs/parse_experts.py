"""Parse the mixture of experts of a config.json."""

from collections.abc import Sequence

from ...errors import ConfigError
from .config import Experts
from .mixtures import Mixture
from .parse_layers import activation_of, period_of
from .reading import Reader

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
METHODS = ("greedy", "group_limited_greedy")  # values of topk_method
LARGEST_MINIMUM = 1e-6  # a smaller bound of a sum of weights has no effect: no text reaches it


def experts_of(read: Reader, layers: int) -> Experts | None:
    """Return the experts of a config.json; None for a dense model."""
    rules = read.family.experts
    if rules is None:
        return None
    if rules.optional and read.get(rules.count[0]) in (0, None):
        return None
    read, chosen = _by_layer(read, rules.k, layers)
    count, k = (_size(read, keys) for keys in (rules.count, rules.k))
    sparse = _sparse(read, rules, layers)
    if rules.optional and not any(sparse):
        return None
    activation = _activation(read)
    groups, top_groups = _groups(read, rules, count)
    zero = read.size(rules.zero) if rules.zero and read.get(rules.zero) else 0
    if not 1 <= k <= (count + zero if groups is None else count // groups * (top_groups or 0)):
        raise ConfigError(f"config: a router cannot choose {k} experts for a token from {count}")
    if rules.mixer and (k != 2 or count < k):
        raise ConfigError(f"config: {rules.k[0]} is {k}; this router chooses 2 experts")
    minimum = read.get("moe_norm_min")
    if minimum is not None and read.number("moe_norm_min") > LARGEST_MINIMUM:
        problem = f"moe_norm_min is {minimum}, a bound that changes sums of weights"
        raise ConfigError(f"config: {problem}; it must be {LARGEST_MINIMUM} or less")
    shared = _shared(read, rules.shared)
    on = rules.balanced and read.flag("output_router_logits")
    return Experts(
        count=count,
        k=k,
        inner=read.size(rules.inner),
        sparse=sparse,
        activation="swiglu_clamped" if rules.clamped else activation,
        zero=zero,
        scores=rules.scores,
        normalize=read.resolve(rules.normalize),
        groups=groups,
        top_groups=top_groups,
        scale=1.0 if rules.scale is None else read.number(rules.scale),
        jitter=read.number("router_jitter_noise") if rules.mixer else None,
        corrected=rules.correction is not None and read.resolve(rules.correction_if or True),
        wide=rules.wide,
        biases=rules.biases,
        limit=read.number("swiglu_limit") if rules.clamped else None,
        alpha=read.number("swiglu_alpha") if rules.clamped else None,
        shared=shared,
        shared_gate=rules.shared_gate and shared > 0,
        balance=read.number("router_aux_loss_coef") if on else 0.0,
        module=rules.module,
        router=rules.router,
        correction_in=rules.correction or "",
        correction_name=rules.correction_name,
        correction_row=rules.correction_row,
        shared_in=rules.shared_in,
        shared_beside=rules.shared_beside,
        files=rules.files,
        transposed=rules.transposed,
        latent=read.size(rules.latent) if rules.latent and read.get(rules.latent) else None,
        chosen=chosen,
        beside=rules.beside,
        before=rules.before,
        halves=rules.halves,
        pairs=rules.pairs and groups is not None,
        narrow=rules.narrow,
        shortcut=rules.shortcut,
    )


def _activation(read: Reader) -> str:
    """Return the activation of the experts."""
    name, known = activation_of(read), ACTIVATIONS if read.family.gate else {"relu2": "relu2"}
    if name not in known:
        cure = "it must have a gate" if read.family.gate else "without a gate it must be relu2"
        raise ConfigError(f"config: the activation of experts is {name!r}; {cure}")
    return known[name]


def _size(read: Reader, keys: tuple[str, ...]) -> int:
    """Return the size of the first of these keys that is present."""
    there = (key for get in (read.values.get, read.get) for key in keys if get(key) is not None)
    return read.size(next(there, keys[0]))


def _by_layer(read: Reader, keys: tuple[str, ...], layers: int) -> tuple[Reader, tuple[int, ...]]:
    """Return a reader with the largest number of experts of a token, and the number by layer."""
    for key in keys:
        listed = read.values.get(key)
        if not isinstance(listed, list | tuple):
            continue
        if len(listed) < layers or any(type(each) is not int or each < 1 for each in listed):
            problem = f"{key} is {listed!r}"
            raise ConfigError(f"config: {problem}; it must list {layers} numbers, one a layer")
        chosen = tuple(listed[:layers])
        read = Reader({**read.values, key: max(chosen)}, read.family)
        return read, chosen if len({*chosen}) > 1 else ()
    return read, ()


def _groups(read: Reader, rules: Mixture, count: int) -> tuple[int | None, int | None]:
    """Return the number of groups of experts, and how many of them are chosen; None: no groups."""
    if isinstance(rules.grouped, str):
        method = read.get(rules.grouped)
        if method not in METHODS:
            problem = f"{rules.grouped} is {method!r}"
            raise ConfigError(f"config: {problem}; choose from {', '.join(METHODS)}")
        if method == METHODS[0]:
            return None, None
    if not rules.grouped or read.size("n_group") == 1:
        return None, None
    groups, best = read.size("n_group"), read.size("topk_group")
    if count % groups or best > groups or count // groups < 2:
        problem = f"n_group={groups} and topk_group={best} do not divide {count} experts"
        raise ConfigError(f"config: {problem} into groups of 2 or more")
    return groups, best


def _shared(read: Reader, keys: tuple[str, ...]) -> int:
    """Return the inner size of the shared expert, 0 without one."""
    if any(read.get(key) == 0 for key in keys):
        return 0
    size = 1 if keys else 0
    for key in keys:
        size *= read.size(key)
    return size


def _numbered(read: Reader, layers: int) -> Sequence[int]:
    """Return the layers with experts: moe_layers, or every interleave_moe_layer_step-th."""
    own = read.get("moe_layers")
    if own is None:
        step = read.size("interleave_moe_layer_step")
        return range(step - 1, layers, step)
    if not isinstance(own, list | tuple) or any(type(n) is not int for n in own):
        raise ConfigError(f"config: moe_layers is {own!r}; it must list layers")
    return own


def _periodic(read: Reader, rules: Mixture, layers: int) -> Sequence[int]:
    """Return every expert_layer_period-th layer; a model with one expert has only dense layers."""
    period, first = period_of(read, "expert")
    return () if _size(read, rules.count) == 1 else range(first, layers, period)


def _between(read: Reader, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts, from the first, the last and the interval."""
    first, last = read.number("moe_layer_start_index"), read.get("moe_layer_end_index")
    if type(last) is not int or last < -1:
        raise ConfigError(f"config: moe_layer_end_index is {last!r}; it must be a layer")
    step, last = read.size("moe_layer_interval"), layers - 1 if last == -1 else last
    return tuple((n + 1) % step == 0 and first <= n <= last for n in range(layers))


def _sparse(read: Reader, rules: Mixture, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: see ``Mixture.layers``."""
    every = range(layers)
    match rules.layers:
        case "stepped":
            dense, step = read.get("mlp_only_layers") or [], read.size("decoder_sparse_step")
            if not isinstance(dense, list | tuple) or any(type(n) is not int for n in dense):
                raise ConfigError(f"config: mlp_only_layers is {dense!r}; it must list layers")
            return tuple(n not in dense and (n + 1) % step == 0 for n in every)
        case "late":
            first = read.number(rules.first)
            return tuple(n >= first for n in every)
        case "listed" | "listed or late":
            kinds = read.get("mlp_layer_types")
            if kinds is None:
                first = (
                    read.number("first_k_dense_replace") if rules.layers == "listed or late" else 1
                )
                kinds = ["dense" if n < first else "sparse" for n in every]
            listed = isinstance(kinds, list | tuple) and len(kinds) == layers
            if not listed or any(kind not in ("dense", "sparse") for kind in kinds):
                problem = f"mlp_layer_types is {kinds!r}"
                raise ConfigError(
                    f"config: {problem}; it must list dense or sparse, {layers} times"
                )
            return tuple(kind == "sparse" for kind in kinds)
        case "numbered" | "periodic" as kind:
            own = _numbered(read, layers) if kind == "numbered" else _periodic(read, rules, layers)
            return tuple(n in own for n in every)
        case "between":
            return _between(read, layers)
        case kind:
            return tuple(kind != "paired" or n % 2 == 0 for n in every)
