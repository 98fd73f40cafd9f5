"""A model with adapters: add, load, select, mix, merge and save them."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from ...core.call import is_list, is_number
from ...core.dtypes import Array
from ...errors import ConfigError, naming
from ...files import path_of
from ...ops.quantized.weight import Quantized
from ...placement import to_device_of
from ..configs.names import HEAD, TABLE
from ..folders.initial_weights import loftq
from ..folders.quantized_weights import stored_kind
from ..network import Network
from ..quantizer import KINDS, Quantizer, kind_of
from ..ranks.division import divided_adapter
from ..ranks.gather import whole_parameters
from .adapter import TABLES, Adapter, create_adapter
from .adapter_base import base_name, base_of
from .adapter_folder import read_adapter
from .into import Into, check_base, sum_of_base, train_through
from .kept import Kept
from .many import ByRows, mixed
from .outer_folder import base_for


class Adapted(Network):
    """A network with adapters.

    Attributes
    ----------
    adapters : mapping of str to Adapter, read-only
        The named adapters: see ``load_adapter``.
    outdated : frozenset of str
        Names of the adapters that belong to the weights before a merge: they are not used.
    merged : bool
        Whether an adapter was merged: the weights then differ from the folder's.
    grown : bool
        Whether tables have other rows than the folder's, as after new tokens: ``save_adapter``
        then writes these tables too.
    """

    _adapters: dict[str, Adapter]
    outdated: frozenset[str] = frozenset()
    merged: bool = False
    plain: Collection[str] = ()  # expert stacks that the folder stores under their own names
    grown: bool = False

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The named adapters."""
        return MappingProxyType(self._adapters)

    @property
    def home(self) -> Path | None:
        """The folder that new adapters store as their base; None after a merge."""
        return None if self.merged else self.folder

    @naming("add_adapter", "create_adapter", "train_through")
    def add_adapter(self, rank: int, *, name: str | None = None, **options: Any) -> None:
        """Freeze the parameters and add a new adapter: see ``models.create_adapter``.

        ``merge_into`` is the kind of the file that the adapter will be merged into: a kind of
        ``models.quantize``, for folders that ``models.merge`` writes, or a type of
        ``export_gguf``.  The adapter is trained through the quantizer of that file: linear layers
        compute with the file's weights, and the adapter does not fit unrounded weights.

        An adapter with a ``name`` is stored in ``adapters``, beside adapters with other names.

        Without ``base``, adapter_config.json stores the model's name on huggingface.co, if
        config.json (``_name_or_path``) or the folder's path in the local cache contains it, or
        else the path of the folder.

        Raises
        ------
        ConfigError
            The model has an adapter without a name, which the new one would replace, or an
            adapter of this name; or an option is invalid.
        """
        named = any(self.adapter is each for each in self.adapters.values())
        if name is not None:
            self._check_new("add_adapter", name)
        if self.adapter is not None and not (named and name is not None):
            raise ConfigError(
                "add_adapter: the model has an adapter, which a new one would replace; call"
                " merge_adapter() to merge it into the weights, or set adapter = None to remove it"
            )
        kind = options.pop("merge_into", None)
        weights = self._weights_to_adapt(options)
        whole = self.config if self.division is None else self.division.whole
        has_base = options.get("base") is not None
        if not has_base:
            facts = {} if self.merged else self.texts.get("config.json", {})
            options["base"] = base_name(facts, self.home)
        adapter = create_adapter(whole, weights, rank=rank, **options)
        adapter.base = None if has_base else self.home
        if options.get("init") == "loftq" and self.stored is not None:
            read = self.stored("add_adapter").read
            loftq("add_adapter", adapter.parameters, adapter.scales, self.parameters, read)
        before, self.adapter = self.adapter, divided_adapter(adapter, self.division)
        if kind is not None:
            try:
                self.train_through(kind)
            except ConfigError:
                self.adapter = before
                raise
        self._adapters |= {} if name is None else {name: self.adapter}

    def _weights_to_adapt(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weights that ``add_adapter`` passes to ``create_adapter``.

        Raises
        ------
        ConfigError
            This model, or a model that ranks divide, does not support the options.
        """
        lists = {name: options.get(name, ()) for name in ("tokens", "modules")}
        outer = [n for n, each in lists.items() if not is_list(each) or len(each)]
        targets: Any = options.get("targets")
        weights, modules = self.parameters, lists["modules"]
        listed = targets if is_list(targets) else ()
        outer += ["targets"] * any(name in listed for name in TABLES)
        if outer and self.parts is not None:
            weights = self.parts.outside(weights)
        if is_list(modules) and [*modules] == ["score"] and self.gather is None:
            outer.remove("modules")  # every rank of a divided model has the whole head
        if outer and (self.division is not None or self.gather is not None):
            self._require_whole(f"add_adapter({outer[0]}=)", "before the model is divided")
        if options.get("init") is not None:
            self._require_whole("add_adapter(init=)", "before the model is divided")
        if options.get("init") == "loftq" and (self.stored is None or options.get("dora")):
            problem = "loftq needs the model's dense folder and does not support DoRA"
            cure = "load a dense folder with quantize="
            raise ConfigError(f"add_adapter(init='loftq'): {problem}; {cure}")
        if self.parts is not None and options.get("dora"):
            problem = "DoRA needs norms of whole rows, and each rank stores parts of rows"
            raise ConfigError(f"add_adapter(dora=True): {problem}; use LoRA")
        return weights

    def train_through(self, kind: str) -> None:
        """Train the adapter through the quantizer of the file that it will be merged into.

        ``kind``: see ``merge_into`` in ``add_adapter``.

        Raises
        ------
        ConfigError
            There is no adapter, or it is already trained through a quantizer; the kind is unknown,
            or the model does not support it; the adapter has DoRA, or trains tables that the file
            rounds; or the weights are quantized otherwise than by ``load(quantize=)``.
        """
        call = f"train_through({kind!r})"
        rows = isinstance(self.adapter, ByRows)
        if self.adapter is None or rows or self.adapter.into is not None:
            problem = "each row has its own adapter" if rows else "there is no adapter"
            if self.adapter is not None and not rows:
                problem = f"the adapter is already trained through {self.adapter.into.kind}"
            raise ConfigError(f"{call}: {problem}; call add_adapter(rank, merge_into=kind)")
        self._require_whole(call, "on a model that is whole")
        into = Into(call, self.config, kind, *self._base_facts(call), self.table.dtype)
        into.check_names(call, self.config, self.plain)
        into.base = sum_of_base(self.adapter, self.parameters, self.parameters.__getitem__)
        train_through(call, self.adapter, into)

    def _base_facts(self, call: str) -> tuple[str | None, Any]:
        """Return the kind to which ``load`` quantized the weights, and the dtype in the file.

        Raises
        ------
        ConfigError
            The weights are quantized otherwise than by ``load(quantize=)``.
        """
        kinds = {n: kind_of(w) for n, w in self.parameters.items()}
        quantizations = {kind for kind in kinds.values() if kind is not None}
        stored = stored_kind(self.texts["config.json"])
        homes = {} if self.stored is None else self.stored("add_adapter").homes
        dtype = homes[TABLE].dtype if TABLE in homes else self.table.dtype
        files = stored is not None and not KINDS[stored].made
        anew = files and stored not in quantizations  # weights of a GGUF file may be
        if not quantizations or not (stored is None or anew):
            return None, dtype
        rule = Quantizer(call, kind := min(quantizations))
        for name, weight in self.parameters.items():
            if (kinds[name] == kind) != rule.makes(name, weight.shape):
                problem = f"{name} is not quantized as load(quantize={kind!r}) quantizes it"
                raise ConfigError(f"{call}: {problem}; load the model with this option")
        return kind, dtype

    @naming("load_adapter", "load")
    def load_adapter(self, folder: str | PathLike[str], name: str) -> None:
        """Read an adapter in peft's format and store it under a name in ``adapters``.

        The adapter has no effect until ``set_adapter``, ``mix_adapters`` or ``by_rows`` names it.

        Raises
        ------
        ConfigError
            The name is in use; a file is missing or broken; or the adapter belongs to another
            model, or to this model with a grown vocabulary or an untied head.
        """
        self._check_new("load_adapter", name)
        self._check_base("load_adapter", folder)
        path, config = path_of("load_adapter", folder), self.config
        whole = config if self.division is None else self.division.whole
        if path.is_dir() and base_for(path, whole, {"config.json": {}}, {}) != whole:
            problem = f"{path} changes the tables of the model, which other adapters share"
            raise ConfigError(f"load_adapter: {problem}; use load(base, lora={str(path)!r})")
        complete = self.division is None and self.parts is None and self.gather is None
        weights = self.parameters.__getitem__ if complete else None
        place = partial(to_device_of, like=self.table)
        adapter = read_adapter(path, whole, self.dtype, place, weights)
        adapter.base = self.home
        if (
            adapter.into is not None
            and self._base_facts("load_adapter")[0] != adapter.into.quantize
        ):
            kind = adapter.into.quantize or "dense"
            problem = f"{path} was trained with {kind} weights of its base"
            raise ConfigError(f"load_adapter: {problem}; use load(base, lora={str(path)!r})")
        check_base("load_adapter", adapter, self.folder, self.parameters, weights)
        self._adapters[name] = divided_adapter(adapter, self.division)

    def _check_new(self, call: str, name: Any) -> None:
        """Raise a ConfigError unless ``name`` is a string that no adapter has."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{call}(name={name!r}): pass a name, such as 'chat'")
        if name in self.adapters:
            cure = "choose another, or call delete_adapter(name) first"
            raise ConfigError(f"{call}(name={name!r}): an adapter has this name; {cure}")

    def _check_base(self, call: str, folder: str | PathLike[str]) -> None:
        """Raise a ConfigError if an adapter's folder belongs to the weights before a merge."""
        if not self.merged or self.folder is None:
            return
        path = path_of(call, folder)
        try:
            base = base_of(path)
        except ConfigError:  # the base is not on this machine
            return
        if base is not None and base.resolve() == self.folder.resolve():
            problem = f"{path} belongs to the weights of {self.folder} before merge_adapter()"
            raise ConfigError(f"{call}: {problem}; load the model again to use it")

    def _check_known(self, call: str, names: Iterable[Any]) -> None:
        """Raise a ConfigError for a name that no adapter has, or that is outdated."""
        for name in names:
            if name not in self.adapters:
                known = ", ".join(map(repr, self.adapters)) or "none: load_adapter(folder, name)"
                raise ConfigError(f"{call}: no adapter is named {name!r}; there is {known}")
            if name in self.outdated:
                problem = f"{name!r} belongs to the weights before merge_adapter()"
                cure = f"adapters[{name!r}].save(folder) writes it, and load(base, lora=folder)"
                raise ConfigError(f"{call}: {problem}; {cure} reads it with those weights")

    def set_adapter(self, name: str | None) -> None:
        """Select the adapter that the model computes with; None: the base alone.

        Raises
        ------
        ConfigError
            No adapter has this name, or the current adapter has no name and would be lost.
        """
        self._check_known("set_adapter", [] if name is None else [name])
        if self.adapter is not None and self.adapter not in self.adapters.values():
            problem = "the model's adapter has no name and would be lost"
            cure = "name it first: save_adapter(folder), then load_adapter(folder, name) into a"
            cure += " model without it; or set adapter = None"
            raise ConfigError(f"set_adapter({name!r}): {problem}; {cure}")
        self.adapter = None if name is None else self._adapters[name]

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter; if it is in use, the model then computes with the base alone.

        Raises
        ------
        ConfigError
            No adapter has this name.
        """
        if name not in self.outdated:
            self._check_known("delete_adapter", [name])
        if self._adapters.pop(name) is self.adapter:
            self.adapter = None
        self.outdated -= {name}

    def mix_adapters(self, weights: Mapping[str, float], name: str) -> None:
        """Store the weighted sum of adapters as a new adapter, whose rank is the sum of ranks.

        The new adapter changes a weight by sum(weight scale B A), as peft's
        ``add_weighted_adapter`` with ``combination_type="cat"``.

        Raises
        ------
        ConfigError
            No adapter has one of the names, or one has the new name; a weight is not a number; or
            an adapter has more parameters than A and B: DoRA, biases, token rows, modules or
            experts.
        """
        self._check_new("mix_adapters", name)
        self._check_known("mix_adapters", weights)
        if not weights or not all(map(is_number, weights.values())):
            raise ConfigError(
                f"mix_adapters({weights!r}): pass numbers by name, such as {{'chat': 0.5}}"
            )
        self._require_whole("mix_adapters", "before the model is divided")
        self._adapters[name] = mixed(self._adapters, weights)

    def by_rows(self, names: Sequence[str | None]) -> Self:
        """Return this model for batches in which each row has its own adapter.

        ``names`` has one name for each row, or for each text of a packed batch; None: the base
        alone.  Rows with the same adapter have the results of a batch of these rows alone, up to
        the order of sums; in an invariant model the bits are equal.  The same holds for the
        gradients of an adapter, if ``count`` is equal.
        For ``rollouts``, ``names`` has one name for each prompt, which all its samples use.
        ``trainable`` has the parameters of all named adapters, as ``NAME@ADAPTER``; they can be
        trained together, and are the arrays of ``adapters``.

        Raises
        ------
        ConfigError
            No adapter has one of the names; an adapter changes tables, heads or experts; or ranks
            divide the model.

        Examples
        --------
        >>> from unsloth_cupy.models import create
        >>> model = create(
        ...     {
        ...         "model_type": "llama",
        ...         "vocab_size": 99,
        ...         "hidden_size": 32,
        ...         "intermediate_size": 64,
        ...         "num_hidden_layers": 1,
        ...         "num_attention_heads": 2,
        ...     },
        ...     seed=0,
        ... )
        >>> model.add_adapter(4, name="chat")
        >>> model.add_adapter(8, name="code")
        >>> tokens = np.arange(9).reshape(3, 3)
        >>> model.by_rows(["chat", None, "code"]).generate(tokens, max_new_tokens=2).shape
        (3, 5)
        """
        self._check_known("by_rows", (name for name in names if name is not None))
        self._require_whole("by_rows", "before the model is divided")
        model = copy.copy(self)
        model.adapter = ByRows(self._adapters, names)
        return model

    def _require_whole(self, call: str, when: str) -> None:
        """Raise a ConfigError if ranks divide the parameters."""
        if self.division is not None or self.parts is not None or self.gather is not None:
            problem = "ranks divide the tables of this model, and this call needs whole tables"
            raise ConfigError(f"{call}: {problem}; call it {when}, or use data parallelism alone")

    @naming("merge_adapter", "merge")
    def merge_adapter(self, *, requantize: bool = False) -> Kept:
        """Merge the adapter into the weights, which become new arrays, and remove the adapter.

        Other named adapters belong to the weights before the merge: ``outdated`` has their names,
        and the only use of them is ``adapters[name].save(folder)``.  An adapter that is added
        after the merge stores no base: ``save`` writes the base, and ``load(folder, lora=)`` reads
        both.

        All quantized weights become dense; ``requantize`` quantizes them again.  The new rounding
        errors can remove a small update: below 90 % of the update a warning is issued.

        Returns
        -------
        kept : Kept
            The share of the update that rounding preserves, in ``kept.share`` and
            ``kept.layers``: <merged - weight, change> / <change, change> over the weights that
            were rounded.

        Raises
        ------
        ConfigError
            There is no adapter.
        """
        if self.adapter is None:
            raise ConfigError(
                "merge_adapter: there is no adapter; call add_adapter(rank), or load(lora=folder)"
            )
        self.parameters, kept = self.adapter.merged(self.parameters, requantize)
        values = self.parameters.values()
        kinds = {type(each).__name__ for each in values if isinstance(each, Quantized)}
        cure = "without requantize the weights are dense, and models.merge(folder, out) writes them"
        if not kinds:
            kinds, cure = {self.table.dtype.name}, "load(folder, dtype='float32') preserves it"
        kept.warn("merge_adapter", " and ".join(sorted(kinds)), cure)
        self._adapters = {n: each for n, each in self._adapters.items() if each is not self.adapter}
        self.outdated, self.merged = frozenset(self._adapters), True
        self.adapter = self.stored = None
        return kept

    @property
    def base(self) -> Self:
        """The model without its adapter, with the same parameters: a policy's reference model."""
        base = copy.copy(self)
        base.adapter = None
        return base

    @naming("save_adapter", "save")
    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Write only the adapter, in peft's format; ``load(base, lora=folder)`` reads it."""
        if self.adapter is None:
            raise ConfigError("save_adapter: there is no adapter; call add_adapter(rank) first")
        for own in whole_parameters(self.adapter.parameters | self.grown_tables(), self.division):
            tables = {name: own.pop(name) for name in self.grown_tables()}
            self.adapter.holding(own).save(folder, tables)

    def grown_tables(self) -> dict[str, Array]:
        """Return the tables if they are ``grown``, as the argument of ``Adapter.save``."""
        names = (TABLE, HEAD) if self.grown else ()
        return {name: self.parameters[name] for name in names if name in self.parameters}
