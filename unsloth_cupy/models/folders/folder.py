"""Models loaded from folders: ``load``."""

from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from ...core.call import in_any_case, is_integer
from ...core.dtypes import float_dtype
from ...errors import ConfigError
from ...files import missing_folder_advice, of_one_save, path_of
from ...machine import on_device
from ...parallel.communicator import Communicator
from ..adapters.adapter_base import ADAPTER, base_of
from ..adapters.adapter_folder import read_adapter
from ..adapters.into import check_base, quantize_of
from ..gguf.opening import folder_of
from ..quantizer import KINDS, Quantizer, check_stacks, maker_of
from ..ranks.division import divided_adapter
from ..text.tokenizer import has_tokenizer
from ..transformer import Transformer
from .checkpoint import Checkpoint, checkpoint_of
from .checkpoint_files import opened
from .create import drawn
from .expert_homes import plain_names
from .joined import join_quantized
from .rank_part import RankPart, division_of
from .stored import stored_model


def load(
    folder: str | PathLike[str],
    *,
    dtype: Any = None,
    device: str | None = None,
    quantize: str | None = None,
    lora: str | PathLike[str] | None = None,
    communicator: Communicator | None = None,
    pipeline: Communicator | None = None,
    chunks: int = 1,
    parts: Communicator | None = None,
    experts: Communicator | None = None,
    head: str | None = None,
    labels: int | None = None,
    seed: int = 0,
    invariant: bool = False,
) -> Transformer:
    """Return the model of a Hugging Face folder: config.json and safetensors files.

    Model types are those of Llama and its dense relatives, the text parts of models that read
    images, and others that transformers knows and that compute the same as one of these: the
    guide lists them.  The name, shape and dtype of every tensor are checked before any is used;
    pickled weights are never read and no code in a folder is ever run.

    Parameters
    ----------
    folder : path
        Holds config.json, one or several ``*.safetensors`` files and, where the end tokens
        differ from config.json's, generation_config.json.  Or an adapter folder of peft, whose
        base model is here: in the folder that it names, or by that name in the local cache of
        models ($HF_HUB_CACHE or $HF_HOME/hub).  Or a GGUF file, or a folder that holds one.
    dtype : dtype or its name, optional
        float16, bfloat16, float32 or float64; None keeps the checkpoint's.
    device : str, optional
        "cuda" or "cuda:1" puts the parameters there, as CuPy arrays; None or "cpu": NumPy.
        "auto": the first GPU that can be used, else NumPy; a GPU that cannot be used is warned of.
    quantize : str, optional
        nf4, nf4-double, fp4, int8 or ternary: linear layers are quantized as they are read, by
        ``models.quantize``'s rules.  None keeps the weights of the folder, which may be quantized
        already: by transformers with bitsandbytes, or packed BitNet layers.  Those of GPTQ, AWQ,
        FP8 and compressed-tensors become dense as they are read, as do those of GGUF but for
        those in blocks of 32 (``models.gguf.packed``), which stay packed, or are quantized anew.
    lora : path, optional
        A folder of peft: adapter_config.json and adapter_model.safetensors (LoRA, rsLoRA, DoRA,
        tokens, whole modules); tables of the base in it take the place of the folder's.  Or one
        of mlx-lm: adapter_config.json and adapters.safetensors (LoRA, DoRA).
        Tensors whose dtype cannot be combined with the model's are read as float32.  None loads
        the adapter of ``folder``, if it is an adapter folder.
    communicator : Communicator, optional
        Ranks of tensor parallelism, which divide the model by heads, inner size and vocabulary.
        Each reads only its part of the files; but columns of 4-bit weights, and weights whose
        scales depend on other ranks' parts, one whole weight at a time.  All ranks make the same
        calls, and get the results of one device; ``save`` writes the whole model.
    pipeline : Communicator, optional
        Ranks of pipeline parallelism, which divide the blocks: ``generate`` runs through all of
        them; ``models.ranks.stages`` runs training steps.
    chunks : int
        Chunks of blocks in each rank of a pipeline; more than 1 for an interleaved schedule.
    parts : Communicator, optional
        Ranks that each keep a part of every parameter, and read only that part or whole rows of
        it; but ternary weights, and codes whose scales need more than these rows, one whole
        weight at a time.  ``parallel.Zero3(model, parts)`` trains the model.
    experts : Communicator, optional
        Ranks of expert parallelism: each reads and holds some of the experts of every layer, and
        all else, and computes other rows of a batch.  Tokens go to the ranks of their experts, so
        all ranks make as many calls at the same time; of ``generate`` the same ones.
        ``parallel.DataParallel`` over these, or more, ranks sums their gradients.
    head : str, optional
        causal_lm, sequence_classification, token_classification, or none for embeddings alone.
        None: what ``architectures`` in config.json says or, of an adapter for classifiers, its
        ``task_type``.  A classifier of another kind or size than the folder's is new, and so is an
        ``lm_head`` that the folder lacks.
    labels : int, optional
        Outputs of a classifier; None: those of the folder's.
    seed : int
        Of a new head, which is drawn as ``create`` draws matrices; biases are 0.
    invariant : bool
        Whether what is computed of a text is equal to the bit whatever is computed beside it, and
        so in sampling and in training; slower.  ``model.invariant`` may be set later, too.

    Returns
    -------
    model : Transformer

    Raises
    ------
    ConfigError
        A file is missing, broken or contradicts config.json; or the model cannot be divided among
        the ranks.  The message says what to do.
    DeviceError
        The device does not exist; the message names those that do.
    """
    path = folder_of(path_of("load", folder))
    if not path.is_dir():
        cure = missing_folder_advice(path, "pass one that holds config.json")
        raise ConfigError(f"load: {path} is not a folder; {cure}")
    adapter = None if lora is None else path_of("load(lora=)", lora)
    if adapter is None and (base := base_of(path)) is not None:
        path, adapter = base, path
    if not is_integer(seed):
        raise ConfigError(f"load(seed={seed!r}): pass an integer, 0 or more")
    quantize = in_any_case(quantize, KINDS)
    quantize = quantize if adapter is None else quantize_of("load", adapter, quantize)
    with ExitStack() as files:
        read = partial(_opened, path, adapter, head, labels, files)
        checkpoint, handles = of_one_save(path, "config.json", read)
        config = checkpoint.config
        if quantize is not None:
            maker_of("load", quantize)
            check_stacks("load", quantize, config)
        chosen = None if dtype is None else float_dtype("load", dtype)
        kind = chosen or checkpoint.dtype
        division = division_of("load", config, kind, communicator, pipeline, chunks, experts)
        quantizer = None if quantize is None else Quantizer("load", quantize, division)
        with on_device("load", device) as place:
            part = RankPart(config, place, division, parts, quantizer)
            parameters = checkpoint.read(handles, chosen, part)
            for name, number in checkpoint.new.items():
                if part.holds(name):
                    parameters[name] = part.draw(name, drawn(config, name, kind, [seed, number]))
            model = Transformer(
                division.config if division else config,
                join_quantized(parameters),
                checkpoint.texts,
                checkpoint.layout,
            )
            model.folder, model.division, model.parts = path, division, part.parts
            model.stored = partial(stored_model, folder=path)
            model.plain, model.origin = plain_names(checkpoint.homes), checkpoint.origin
            model.words = next((p for p in (adapter, path) if p and has_tokenizer(p)), None)
            if adapter is not None:
                whole = division is None and part.parts is None
                weights = parameters.__getitem__ if whole else None
                own = read_adapter(adapter, config, model.table.dtype, place, weights)
                own.base, model.grown = path, checkpoint.has_tables_of_adapter
                model.adapter = divided_adapter(own, division)
                check_base("load", own, path, parameters, weights)
            return model.in_order(invariant)


def _opened(
    path: Path, adapter: Path | None, head: str | None, labels: int | None, stack: ExitStack
) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the checkpoint of a folder, and its open files by name."""
    stack.close()  # files of an earlier try
    if not (path / "config.json").exists():
        inside = sorted(
            str(p.parent) for n in ("config.json", ADAPTER) for p in path.glob(f"*/{n}")
        )
        cure = f"pass {' or '.join(inside[:3]) or 'a folder that holds one'}"
        raise ConfigError(f"load: {path / 'config.json'} is missing; {cure}")
    checkpoint = checkpoint_of(path, adapter, head, labels)
    handles = {f: stack.enter_context(opened(path / f)) for f in checkpoint.all_files}
    return checkpoint, handles
