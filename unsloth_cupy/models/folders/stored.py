"""A model on disk whose parameters are read one by one, for writers of folders and files.

model = stored_model("merge", "runs/chat/model")
weight = model.read("lm_head.weight")             of the base, as stored
weight = model.merged("lm_head.weight")           with the adapter, if the folder holds one
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...files import PARTIAL, files_state, missing_folder_advice, of_one_save, path_of
from ...ops.quantized.weight import Quantized
from ..adapters.adapter import Adapter
from ..adapters.adapter_base import ADAPTER, base_of
from ..adapters.adapter_folder import read_adapter
from ..adapters.into import check_base
from ..configs.config import Config
from ..configs.names import ADAPTED, TABLE
from ..gguf.opening import folder_of
from ..quantizer import Quantizer
from ..text.tokenizer import has_tokenizer
from .checkpoint import Checkpoint, checkpoint_of
from .checkpoint_files import opened
from .lazy_parameter import LazyParameter, StoredTensor


class StoredModel(NamedTuple):
    """A model on disk: its config, and where each parameter is stored."""

    call: str
    path: Path  # as passed: an adapter's folder, or the model's
    folder: Path  # with config.json and the weights
    config: Config
    texts: Mapping[str, Mapping[str, Any]]
    homes: Mapping[str, StoredTensor]
    adapter: Adapter | None
    state: Mapping[str, Any]

    @property
    def words(self) -> Path:
        """The folder of the tokenizer: the adapter's if it has one, or the base's."""
        return self.path if has_tokenizer(self.path) else self.folder

    def read(self, name: str, dtype: "np.dtype[Any] | None" = None) -> Any:
        """Return a parameter, an array or a quantized weight; dtype None: as in the file."""
        place = self.homes[name]
        with self._opened(place) as handles:
            into = None if self.adapter is None else self.adapter.into
            dense = place.computed and place.kind is None
            used = into.read if into is not None and dense else None  # the dtype in training
            weight = LazyParameter(name, place, handles, used or dtype).whole()
        if used is not None and dtype is not None:
            weight = weight.astype(np.promote_types(dtype, used), copy=False)
        stays = isinstance(weight, Quantized) and weight.IN_FOLDERS
        if into is None or into.quantize is None or stays:
            return weight
        return Quantizer(self.call, into.quantize)(name, weight)

    @contextlib.contextmanager
    def _opened(self, place: StoredTensor) -> Iterator[dict[str, Any]]:
        """Open the files of a parameter."""
        with contextlib.ExitStack() as stack:
            handles = {f: stack.enter_context(opened(self.folder / f)) for f in place.files}
            if files_state(self.folder) != self.state:
                problem = f"{self.call}: {self.folder} was saved again in the meantime"
                raise ConfigError(f"{problem}; call it again")
            yield handles

    def rows(self, name: str, dtype: "np.dtype[Any]") -> Callable[[slice], Any] | None:
        """Return a function that reads rows of ``merged(name)`` alone.

        None: the parameter has an adapter, or its file stores it in another form.
        """
        place, adapter = self.homes[name], self.adapter
        own = ADAPTED + name.removesuffix("weight")
        if adapter is not None and (
            adapter.into is not None or any(each.startswith(own) for each in adapter.parameters)
        ):
            return None
        if place.kind is not None or place.computed or place.stack is not None:
            return None

        def read(part: slice) -> Any:
            with self._opened(place) as handles:
                return LazyParameter(name, place, handles, dtype)[part]

        return read

    def merged(self, name: str, dtype: "np.dtype[Any] | None" = None, *, exact: bool = True) -> Any:
        """Return a parameter with its adapter merged, if it has one, in float32 or wider.

        With ``exact`` the result is not rounded; else it is rounded as in the file that the adapter
        is trained for.
        """
        own = None if self.adapter is None else self.adapter.parameters.get(ADAPTED + name)
        if own is not None:  # it replaces the base's, which may be missing
            return own.astype(dtype or FLOAT32)
        if self.adapter is None:
            return self.read(name, dtype)
        if exact or self.adapter.into is None:
            return self.adapter.merge(name, self.read(name, dtype), exact=True)
        return self.adapter.merge(name, self.read(name, dtype or FLOAT32), requantize=True)


def model_of_run(path: Path) -> Path:
    """Return the folder of a run's model or of its newest checkpoint; other paths unchanged."""
    if any((path / name).exists() for name in ("config.json", ADAPTER)):
        return path
    if (path / "model").is_dir():
        return path / "model"
    saved = (each for each in path.glob("checkpoint-*") if not each.name.endswith(PARTIAL))
    return max(saved, default=path)


def stored_model(
    call: str,
    folder: str | PathLike[str],
    base: str | PathLike[str] | None = None,
    dtype: "np.dtype[Any] | None" = None,
) -> StoredModel:
    """Return the model in a folder, or an adapter with its base, and check every file.

    The folder may be that of a run: see ``model_of_run``.

    ``dtype`` is the dtype of the weights that the adapter will be merged into; None: as stored.

    Raises
    ------
    ConfigError
        A file is missing or broken, or contradicts config.json; the message begins with ``call``.
    """
    path = folder_of(model_of_run(path_of(call, folder)))
    if not path.is_dir():
        cure = missing_folder_advice(
            path, "pass one that holds config.json, or the folder of an adapter"
        )
        raise ConfigError(f"{call}: {path} is not a folder; {cure}")
    home = base_of(path, base)
    whole = home or path

    def read() -> tuple[Checkpoint, dict[str, Any]]:
        return checkpoint_of(whole, home and path), files_state(whole)

    checkpoint, state = of_one_save(whole, "config.json", read)
    config, texts, homes = checkpoint.config, checkpoint.texts, checkpoint.homes
    for name, shape in config.shapes().items():  # a head that only the adapter has
        homes.setdefault(name, StoredTensor(checkpoint.files[-1], name, shape, homes[TABLE].dtype))
    model = StoredModel(call, path, whole, config, texts, homes, None, state)
    if home is None:
        return model
    adapter = read_adapter(path, config, dtype or homes[TABLE].dtype or FLOAT32, weights=model.read)
    merged = model._replace(adapter=adapter)
    check_base(call, adapter, home, homes, lambda name: merged.read(name, FLOAT32))
    return merged
