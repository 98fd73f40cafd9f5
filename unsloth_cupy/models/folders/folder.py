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

    The guide lists the supported model types: Llama and similar dense models, the text parts of
    models that read images, and other types in transformers that compute the same as one of these.
    The name, shape and dtype of every tensor are checked before any tensor is used.  Pickled
    weights are never read, and code in the folder is never run.

    Parameters
    ----------
    folder : path
        A folder with config.json, one or several ``*.safetensors`` files and, if the end tokens
        differ from config.json's, generation_config.json.  Or an adapter folder of peft whose base
        model is on this machine, either at the path in the adapter's config or under the name there
        in the local cache of models ($HF_HUB_CACHE or $HF_HOME/hub).  Or a GGUF file, or a folder
        that contains one.
    dtype : dtype or its name, optional
        float16, bfloat16, float32 or float64; None: the dtype of the checkpoint.
    device : str, optional
        "cuda" or "cuda:1" puts the parameters there, as CuPy arrays; None or "cpu": NumPy.
        "auto": the first usable GPU, else NumPy; a GPU that cannot be used causes a warning.
    quantize : str, optional
        nf4, nf4-double, fp4, int8 or ternary: linear layers are quantized when they are read, by
        the rules of ``models.quantize``.  None: weights are loaded as stored.  The stored weights
        may already be quantized: by bitsandbytes through transformers, or as packed BitNet layers.
        Weights in GPTQ, AWQ, FP8, compressed-tensors and GGUF formats are dequantized when they are
        read, except that GGUF types with blocks of 32 (``models.gguf.packed``) stay packed unless
        ``quantize`` is passed.
    lora : path, optional
        An adapter folder of peft: adapter_config.json and adapter_model.safetensors (LoRA, rsLoRA,
        DoRA, tokens, whole modules); if it stores the embedding or the head of the base model,
        these replace the ones in ``folder``.  Or an adapter folder of mlx-lm: adapter_config.json
        and adapters.safetensors (LoRA, DoRA).  Tensors whose dtype cannot be combined with the
        model's are read as float32.  None: the adapter of ``folder``, if it is an adapter folder.
    communicator : Communicator, optional
        Ranks of tensor parallelism, which split the attention heads, the intermediate size and the
        vocabulary.  Each rank reads only its part of the files.  Exceptions are columns of 4-bit
        weights, and weights whose scales depend on other ranks' parts: they are read whole, one at
        a time.  All ranks must make the same calls; each gets the same results as one device would.
        ``save`` writes the whole model.
    pipeline : Communicator, optional
        Ranks of pipeline parallelism, which split the blocks.  ``generate`` runs through all ranks;
        ``models.ranks.stages`` runs training steps.
    chunks : int
        Number of chunks of blocks per pipeline rank; more than 1 for an interleaved schedule.
    parts : Communicator, optional
        Ranks that each store a part of every parameter, and read only this part or its whole
        rows.  Exceptions are ternary weights, and codes whose scales depend on other rows: they
        are read whole, one at a time.  ``parallel.Zero3(model, parts)`` trains the model.
    experts : Communicator, optional
        Ranks of expert parallelism.  Each rank reads and stores some experts of every layer and all
        other weights, and computes its own rows of a batch.  Tokens are sent to the ranks that
        store their experts, so all ranks must make the same number of calls at the same time, and
        call ``generate`` with equal arguments.  ``parallel.DataParallel`` over these or more ranks
        sums the gradients.
    head : str, optional
        causal_lm, sequence_classification, token_classification, or none to compute only
        embeddings.  None: the head in ``architectures`` of config.json or, with an adapter for a
        classifier, in the adapter's ``task_type``.  If the folder has no such head, or a classifier
        of another size, the head is newly initialized.
    labels : int, optional
        Number of outputs of a classifier; None: as in the folder.
    seed : int
        Seed of a new head, whose matrices are initialized as in ``create``; biases are 0.
    invariant : bool
        Whether the results for a text are bitwise independent of the rest of the batch, and bitwise
        equal in sampling and in training; slower.  ``model.invariant`` can be set later, too.

    Returns
    -------
    model : Transformer

    Raises
    ------
    ConfigError
        A file is missing, broken or contradicts config.json; or the ranks cannot divide the model.
        The message says what to do.
    DeviceError
        The device does not exist; the message names the existing devices.
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
        ranks = {"communicator": communicator, "pipeline": pipeline, "parts": parts}
        if config.modules and (ways := [name for name, each in ranks.items() if each]):
            problem = f"load({ways[0]}=): ranks do not divide the Dense modules in {path}"
            raise ConfigError(f"{problem}; leave {ways[0]} out")
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
    stack.close()  # files of an earlier attempt
    if not (path / "config.json").exists():
        inside = sorted(
            str(p.parent) for n in ("config.json", ADAPTER) for p in path.glob(f"*/{n}")
        )
        cure = f"pass {' or '.join(inside[:3]) or 'a folder that holds one'}"
        raise ConfigError(f"load: {path / 'config.json'} is missing; {cure}")
    checkpoint = checkpoint_of(path, adapter, head, labels)
    handles = {f: stack.enter_context(opened(path / f)) for f in checkpoint.all_files}
    return checkpoint, handles
