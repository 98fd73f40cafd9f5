"""A model whose adapters are added, kept by name, mixed, merged and saved."""

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
        Those that are kept by name: see ``load_adapter``.
    outdated : frozenset of str
        The names of those that belong to the weights from before a merge: they are not used.
    merged : bool
        Whether an adapter was merged: the weights are no longer those of the folder.
    grown : bool
        Whether its tables differ from the folder's, as of new tokens: an adapter's file has them.
    """

    _adapters: dict[str, Adapter]
    outdated: frozenset[str] = frozenset()
    merged: bool = False
    plain: Collection[str] = ()  # stacks of experts that the folder has under their own names
    grown: bool = False

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that are kept by name."""
        return MappingProxyType(self._adapters)

    @property
    def home(self) -> Path | None:
        """The folder that has its weights, as the base of adapters; None after a merge."""
        return None if self.merged else self.folder

    @naming("add_adapter", "create_adapter", "train_through")
    def add_adapter(self, rank: int, *, name: str | None = None, **options: Any) -> None:
        """Freeze the parameters and add a new adapter: see ``models.create_adapter``.

        ``merge_into`` is the kind of the file that it will be merged into, and through whose
        quantizer it is then trained: a kind of ``models.quantize``, of folders that
        ``models.merge`` writes, or a type of ``export_gguf``.  Products then use the weights
        of that file, and the adapter alone is not the model.

        With a ``name`` it is kept among ``adapters``, beside those that have other names.

        Without ``base``, its adapter_config.json names the model by its name on huggingface.co, if
        config.json (``_name_or_path``) or its place in the local cache says that, or else by its
        folder.

        Raises
        ------
        ConfigError
            There is an adapter without a name, which a new one would replace, or one of this name;
            or an option is invalid.
        """
        named = any(self.adapter is each for each in self.adapters.values())
        if name is not None:
            self._check_new("add_adapter", name)
        if self.adapter is not None and not (named and name is not None):
            raise ConfigError(
                "add_adapter: the model has an adapter, which a new one would replace; call"
                " merge_adapter() to keep what it learned, or set adapter = None to drop it"
            )
        kind = options.pop("merge_into", None)
        weights = self._weights_to_adapt(options)
        whole = self.config if self.division is None else self.division.whole
        known = options.get("base") is not None
        if not known:
            known_as = {} if self.merged else self.texts.get("config.json", {})
            options["base"] = base_name(known_as, self.home)
        adapter = create_adapter(whole, weights, rank=rank, **options)
        adapter.base = None if known else self.home
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
        """Return the parameters beside which ``add_adapter`` makes an adapter.

        Raises
        ------
        ConfigError
            The options are not for this model, or not for one that ranks divide.
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
            outer.remove("modules")  # of which ranks that divide weights have all
        if outer and (self.division is not None or self.gather is not None):
            self._require_whole(f"add_adapter({outer[0]}=)", "before the model is divided")
        if options.get("init") is not None:
            self._require_whole("add_adapter(init=)", "before the model is divided")
        if options.get("init") == "loftq" and (self.stored is None or options.get("dora")):
            problem = "loftq needs the dense folder of the model, and has no DoRA"
            raise ConfigError(f"add_adapter(init='loftq'): {problem}; load one with quantize=")
        if self.parts is not None and options.get("dora"):
            problem = "norms are of whole rows, which ranks keep parts of"
            raise ConfigError(f"add_adapter(dora=True): {problem}; use LoRA")
        return weights

    def train_through(self, kind: str) -> None:
        """Train the adapter through the quantizer of the file that it will be merged into.

        ``kind`` is ``merge_into`` of ``add_adapter``.

        Raises
        ------
        ConfigError
            There is no adapter, or it is trained through a quantizer already; the kind is unknown,
            or not for this model; the adapter has DoRA, or tables that the file rounds; or weights
            are not quantized as ``load(quantize=)`` does it.
        """
        call = f"train_through({kind!r})"
        rows = isinstance(self.adapter, ByRows)
        if self.adapter is None or rows or self.adapter.into is not None:
            problem = "rows have adapters of their own" if rows else "there is no adapter"
            if self.adapter is not None and not rows:
                problem = f"the adapter is trained through {self.adapter.into.kind} already"
            raise ConfigError(f"{call}: {problem}; call add_adapter(rank, merge_into=kind)")
        self._require_whole(call, "on a model that is whole")
        into = Into(call, self.config, kind, *self._base_facts(call), self.table.dtype)
        into.check_names(call, self.config, self.plain)
        into.base = sum_of_base(self.adapter, self.parameters, self.parameters.__getitem__)
        train_through(call, self.adapter, into)

    def _base_facts(self, call: str) -> tuple[str | None, Any]:
        """Return the kind to which weights were quantized as they were read, and the file's dtype.

        Raises
        ------
        ConfigError
            Other weights are quantized than those that ``load(quantize=)`` quantizes.
        """
        kinds = {n: kind_of(w) for n, w in self.parameters.items()}
        quantizations = {kind for kind in kinds.values() if kind is not None}
        stored = stored_kind(self.texts["config.json"])
        homes = {} if self.stored is None else self.stored("add_adapter").homes
        dtype = homes[TABLE].dtype if TABLE in homes else self.table.dtype
        files = stored is not None and not KINDS[stored].made
        anew = files and stored not in quantizations  # as those of a GGUF file may be
        if not quantizations or not (stored is None or anew):
            return None, dtype
        rule = Quantizer(call, kind := min(quantizations))
        for name, weight in self.parameters.items():
            if (kinds[name] == kind) != rule.makes(name, weight.shape):
                problem = f"{name} is not quantized as load(quantize={kind!r}) does it"
                raise ConfigError(f"{call}: {problem}; load the model so")
        return kind, dtype

    @naming("load_adapter", "load")
    def load_adapter(self, folder: str | PathLike[str], name: str) -> None:
        """Read an adapter of peft's format and keep it by name among ``adapters``.

        It takes no part until ``set_adapter``, ``mix_adapters`` or ``by_rows`` names it.

        Raises
        ------
        ConfigError
            The name is taken; or a file is missing or broken, or is of another model, also of one
            whose vocabulary has grown or whose head is no longer tied.
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
            beside = adapter.into.quantize or "dense"
            problem = f"{path} was trained beside {beside} weights of its base"
            raise ConfigError(f"load_adapter: {problem}; use load(base, lora={str(path)!r})")
        check_base("load_adapter", adapter, self.folder, self.parameters, weights)
        self._adapters[name] = divided_adapter(adapter, self.division)

    def _check_new(self, call: str, name: Any) -> None:
        """Raise a ConfigError unless this is a name that no adapter has."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{call}(name={name!r}): pass a name, as 'chat'")
        if name in self.adapters:
            cure = "choose another, or remove that by delete_adapter(name)"
            raise ConfigError(f"{call}(name={name!r}): an adapter has this name; {cure}")

    def _check_base(self, call: str, folder: str | PathLike[str]) -> None:
        """Raise a ConfigError for the folder of an adapter of the weights from before a merge."""
        if not self.merged or self.folder is None:
            return
        path = path_of(call, folder)
        try:
            base = base_of(path)
        except ConfigError:  # it is not here
            return
        if base is not None and base.resolve() == self.folder.resolve():
            problem = f"{path} belongs to the weights of {self.folder}, into which one was merged"
            raise ConfigError(f"{call}: {problem} since; load the model again for it")

    def _check_known(self, call: str, names: Iterable[Any]) -> None:
        """Raise a ConfigError for a name that no adapter has, or one of the weights before."""
        for name in names:
            if name not in self.adapters:
                known = ", ".join(map(repr, self.adapters)) or "none: load_adapter(folder, name)"
                raise ConfigError(f"{call}: no adapter is named {name!r}; there is {known}")
            if name in self.outdated:
                problem = f"{name!r} belongs to the weights from before merge_adapter()"
                cure = f"adapters[{name!r}].save(folder) writes it, and load(base, lora=folder)"
                raise ConfigError(f"{call}: {problem}; {cure} reads it beside these")

    def set_adapter(self, name: str | None) -> None:
        """Use an adapter by its name, or with None the base alone.

        Raises
        ------
        ConfigError
            No adapter has this name, or one without a name would be lost.
        """
        self._check_known("set_adapter", [] if name is None else [name])
        if self.adapter is not None and self.adapter not in self.adapters.values():
            problem = "the model's adapter has no name and would be lost"
            cure = "name it first, by save_adapter(folder) and load_adapter(folder, name) into a"
            cure += " model without it, or set adapter = None"
            raise ConfigError(f"set_adapter({name!r}): {problem}; {cure}")
        self.adapter = None if name is None else self._adapters[name]

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter; if it is in use, the model is then the base alone.

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
        """Keep the weighted sum of adapters as a new one, with the sum of their ranks.

        Its change of a weight is sum(weight scale B A): peft's ``add_weighted_adapter`` with
        ``combination_type="cat"``.

        Raises
        ------
        ConfigError
            A name is not known, or the new one taken; a weight is not a number; or an adapter has
            more than A and B: DoRA, biases, token rows, modules or experts.
        """
        self._check_new("mix_adapters", name)
        self._check_known("mix_adapters", weights)
        if not weights or not all(map(is_number, weights.values())):
            raise ConfigError(
                f"mix_adapters({weights!r}): pass numbers by name, as {{'chat': 0.5}}"
            )
        self._require_whole("mix_adapters", "before the model is divided")
        self._adapters[name] = mixed(self._adapters, weights)

    def by_rows(self, names: Sequence[str | None]) -> Self:
        """Return this model for batches whose rows have these adapters; None: the base alone.

        Of packed texts there is one name for each.  Rows of an adapter get the numbers of a batch
        of these rows alone, up to the order of sums, and in an invariant model its bits.  So do the
        gradients of an adapter, for equal ``count``.
        ``rollouts`` takes a name for each prompt, which all of its samples have.
        ``trainable`` has the parameters of all that are named, ``NAME@ADAPTER``, which may be
        trained at once: the arrays are those of ``adapters``.

        Raises
        ------
        ConfigError
            A name is not known; an adapter changes tables, heads or experts; or ranks divide the
            model.

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
            problem = "ranks keep parts of this model's tables, which this needs whole"
            raise ConfigError(f"{call}: {problem}; call it {when}, or use ranks of data alone")

    @naming("merge_adapter", "merge")
    def merge_adapter(self, *, requantize: bool = False) -> Kept:
        """Merge the adapter into the weights, which become new arrays, and remove it.

        Other adapters that are kept by name belong to the weights from before: ``outdated`` has
        their names, and only ``adapters[name].save(folder)`` uses them.  An adapter that is added
        from then on names no base: ``save`` writes it, and ``load(folder, lora=)`` takes both.

        All quantized weights become dense; ``requantize`` quantizes them again, with new errors,
        and a light change is then rounded away.  Below 90 % of the change a warning says so.

        Returns
        -------
        kept : Kept
            The share of the change that is in the weights, ``kept.share`` and ``kept.layers``:
            <merged - weight, change> / <change, change> over the weights that were rounded.

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
        cure = "without requantize weights are dense, and models.merge(folder, out) writes these"
        if not kinds:
            kinds, cure = {self.table.dtype.name}, "load(folder, dtype='float32') keeps it"
        kept.warn("merge_adapter", " and ".join(sorted(kinds)), cure)
        self._adapters = {n: each for n, each in self._adapters.items() if each is not self.adapter}
        self.outdated, self.merged = frozenset(self._adapters), True
        self.adapter = self.stored = None
        return kept

    @property
    def base(self) -> Self:
        """The model without its adapter, on the same parameters: the reference of a policy."""
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
        """Return the tables, if the folder's have other rows, as ``Adapter.save`` takes them."""
        names = (TABLE, HEAD) if self.grown else ()
        return {name: self.parameters[name] for name in names if name in self.parameters}
