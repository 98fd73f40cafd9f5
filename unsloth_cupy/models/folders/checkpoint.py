"""The content of a model's files before weights are read: config, and where each parameter is.

folder of the model ---> read_config, find_tensors --+--> Checkpoint
folder of an adapter --> base_for, with_labels ------+
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.dtypes import FLOAT32
from ..adapters.outer_folder import base_for, implied_head, with_labels
from ..configs.config import Config
from ..configs.config_files import read_config, with_generation
from ..configs.families import FAMILIES
from ..gguf.finding import draft_heads_of
from ..gguf.opening import MARK, source_of
from ..gguf.reading import opened_gguf
from ..ranks.pipeline_stages import EMBEDDING
from .checkpoint_files import SINGLE, Layout, check_mixture, find_tensors
from .lazy_parameter import LazyParameter, StoredTensor, formats_of
from .rank_part import RankPart


class Checkpoint(NamedTuple):
    """What a model's files describe, with the tables of an adapter's folder if it has any.

    Attributes
    ----------
    folder : Path
        Holds config.json and the weights.
    config : Config
        The config of the whole model.
    texts : dict of str to mapping
        The JSON files, by name.
    homes : dict of str to StoredTensor
        Where each parameter is stored, in the config's order, without those of a new head.
    files : list of str
        The files of the folder's weights, in the order in which they are read.
    """

    folder: Path
    config: Config
    texts: dict[str, Mapping[str, Any]]
    homes: dict[str, StoredTensor]
    files: list[str]

    @property
    def dtype(self) -> Any:
        """The dtype of the embedding; float32 if the files store codes."""
        return self.homes[EMBEDDING].dtype or FLOAT32

    @property
    def all_files(self) -> list[str]:
        """The files of all parameters: the folder's, then the adapter's."""
        return [*dict.fromkeys([*self.files, *(home.file for home in self.homes.values())])]

    @property
    def has_tables_of_adapter(self) -> bool:
        """Whether a table of the adapter's file replaces the folder's."""
        return len(self.all_files) > len(self.files)

    @property
    def new(self) -> dict[str, int]:
        """The parameters of a new head, which no file holds, with their index in the config."""
        return {n: i for i, n in enumerate(self.config.shapes()) if n not in self.homes}

    @property
    def origin(self) -> str | None:
        """The formats of the tensors, and a note on the router loss if a GGUF file is a mixture.

        The router loss is off, as in transformers, where ``output_router_logits`` is False for
        such files.
        """
        notes = [each] if (each := formats_of(self.homes)) else []
        if self.config.experts is not None and (self.folder / MARK).is_file():
            known = FAMILIES[self.config.model_type].experts
            if known is not None and known.balanced:
                notes.append("router loss: off, because GGUF has no coefficient for it")
        source = source_of(self.folder)
        if source != self.folder and (heads := draft_heads_of(opened_gguf(source))):
            notes.append(f"draft heads (nextn_predict_layers={heads}): not loaded from GGUF")
        return "; ".join(notes) or None

    def read(self, handles: Mapping[str, Any], dtype: Any, part: RankPart) -> dict[str, Any]:
        """Return this rank's parts of the stored parameters, read file by file.

        ``handles`` are all open files by name; ``dtype`` is the dtype of results, None: as stored.

        Raises
        ------
        ConfigError
            The stored dtypes differ, and ``dtype`` is None.
        """
        if dtype is None:
            check_mixture(self.folder, self.homes)
        parameters: dict[str, Any] = {}
        order = {file: number for number, file in enumerate(self.all_files)}
        for name in sorted(self.homes, key=lambda name: order[self.homes[name].file]):
            if part.holds(name):
                unread = LazyParameter(name, self.homes[name], handles, dtype)
                parameters[name] = part.read(name, unread)
        return {name: parameters[name] for name in self.homes if name in parameters}

    @property
    def layout(self) -> Layout:
        """The parameters of each file that ``save`` writes.

        The adapter's tables go to the first file, new parameters to the last.
        """
        names = {f: [n for n, home in self.homes.items() if home.file == f] for f in self.all_files}
        tables = [name for file in self.all_files[len(self.files) :] for name in names.pop(file)]
        layout = {SINGLE if file.endswith(".gguf") else file: n for file, n in names.items() if n}
        next(iter(layout.values())).extend(tables)
        next(reversed(layout.values())).extend(self.new)
        return layout


def checkpoint_of(
    folder: Path, lora: Path | None = None, head: str | None = None, labels: int | None = None
) -> Checkpoint:
    """Return the checkpoint of a folder, changed as an adapter's folder requires, and check it.

    Raises
    ------
    ConfigError
        A file is missing or broken, or contradicts config.json.
    """
    if lora is not None and head is None:
        head, labels = implied_head(lora, folder, labels)
    config, texts, choice = read_config(folder, head, labels)
    homes, files = find_tensors(folder, config, choice)
    if lora is not None:
        config = with_generation(lora, base_for(lora, config, texts, homes), texts)
        texts["config.json"] = with_labels(lora, texts["config.json"])
    return Checkpoint(folder, config, texts, homes, files)
