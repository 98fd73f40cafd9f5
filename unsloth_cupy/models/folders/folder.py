"""Models loaded from folders and models with random weights: ``load`` and ``create``."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...core import gpu
from ...core.call import check_options, in_any_case, is_integer
from ...core.dtypes import FLOAT32, Array, float_dtype
from ...errors import ConfigError, DeviceError
from ...files import missing_folder_advice, of_one_save, path_of, say_once
from ...machine import check_bytes, resolve_device
from ...ops.quantized.weight import Quantized
from ...parallel.communicator import Communicator, SingleCommunicator, check_communicator
from ...parallel.zero3 import Parts
from ..adapters.adapter_base import ADAPTER, WEIGHTS, base_of
from ..adapters.adapter_folder import read_adapter
from ..adapters.into import check_base, quantize_of
from ..adapters.outer_folder import base_for, implied_head, with_labels
from ..configs.config import Config
from ..configs.config_files import read_config, with_generation
from ..configs.families import FAMILIES
from ..configs.heads import CAUSAL
from ..configs.text_configs import text_config
from ..gguf.opening import MARK, folder_of
from ..parse import parse
from ..quantizer import KINDS, Quantizer, check_stacks, maker_of
from ..ranks.division import Division, divided_adapter
from ..ranks.pipeline_stages import EMBEDDING, Stages
from ..text.tokenizer import has_tokenizer
from ..transformer import Transformer
from .checkpoint_files import find_tensors, opened, read_tensors
from .expert_homes import plain_names
from .joined import Joined, join_quantized
from .lazy_parameter import LazyParameter, StoredTensor, formats_of
from .stored import stored_model

XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.3))}
XIELU |= {"beta": 0.5, "eps": -1e-6}


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
    if lora is None and (base := base_of(path)) is not None:
        path, lora = base, path
    if not is_integer(seed):
        raise ConfigError(f"load(seed={seed!r}): pass an integer, 0 or more")
    head, labels, quantize = _of_adapter(path, lora, head, labels, quantize)
    with ExitStack() as files:
        config, texts, stored_in, handles = of_one_save(
            path, "config.json", partial(_opened, path, files, head, labels)
        )
        if lora is not None:
            config = base_for(Path(lora), config, texts, stored_in)
            texts["config.json"] = with_labels(Path(lora), texts["config.json"])
            for file in {home.file for home in stored_in.values()} - handles.keys():
                handles[file] = files.enter_context(opened(path / file))  # the adapter's
            config = with_generation(path_of("load(lora=)", lora), config, texts)
        if quantize is not None:
            maker_of("load", quantize)
            check_stacks("load", quantize, config)
        chosen_dtype = None if dtype is None else float_dtype("load", dtype)
        division = _division(config, communicator, pipeline, chunks, experts)
        quantizer = None if quantize is None else Quantizer("load", quantize, division)
        rank_parts = None if parts is None else Parts(parts)
        holds = bool if division is None else division.holds
        with on_device("load", device) as place:
            keep = partial(
                _kept,
                place=place,
                quantizer=quantizer,
                division=division,
                parts=rank_parts,
                joined=Joined(config, division),
            )
            parameters, layout = read_tensors(path, stored_in, handles, chosen_dtype, keep, holds)
            others = layout.pop(str(Path(lora, WEIGHTS).resolve()), []) if lora else []
            next(iter(layout.values())).extend(others)
            kind = chosen_dtype or stored_in[EMBEDDING].dtype or FLOAT32
            new = {n: i for i, n in enumerate(config.shapes()) if n not in stored_in}  # of a head
            next(reversed(layout.values())).extend(new)
            for name in filter(holds, new):
                own = place(_own_new(config, name, kind, [seed, new[name]], division))
                parameters[name] = own if rank_parts is None else rank_parts.keep(name, own)
            if division is not None and division.stages is not None:
                division.stages.dtype = kind
            model = Transformer(
                division.config if division else config, join_quantized(parameters), texts, layout
            )
            model.folder, model.division, model.parts = path, division, rank_parts
            model.stored = partial(stored_model, folder=path)
            model.plain, model.origin = plain_names(stored_in), _origin(stored_in, path, config)
            own = (each for each in (lora, path) if each and has_tokenizer(Path(each)))
            model.words = next(map(Path, own), None)
            if lora is not None:
                whole = division is None and rank_parts is None
                weights = parameters.__getitem__ if whole else None
                adapter = read_adapter(lora, config, model.table.dtype, place, weights)
                adapter.base, model.grown = path, bool(others)  # the adapter's file holds tables
                model.adapter = divided_adapter(adapter, division)
                check_base("load", adapter, path, parameters, weights)
            return model.in_order(invariant)


def _of_adapter(
    path: Path, lora: Any, head: str | None, labels: int | None, quantize: str | None
) -> tuple[str | None, int | None, str | None]:
    """Return head, labels and kind of weights of a base, with what its adapter's folder says."""
    quantize = in_any_case(quantize, KINDS)
    if lora is None:
        return head, labels, quantize
    if head is None:
        head, labels = implied_head(path_of("load(lora=)", lora), path, labels)
    return head, labels, quantize_of("load", lora, quantize)


def _opened(
    path: Path, stack: ExitStack, head: str | None, labels: int | None
) -> tuple[Config, dict[str, Mapping[str, Any]], dict[str, StoredTensor], dict[str, Any]]:
    """Return config and texts of a folder, where its tensors are, and its open files by name."""
    stack.close()  # of an earlier try
    if not (path / "config.json").exists():
        inside = sorted(
            str(p.parent) for n in ("config.json", ADAPTER) for p in path.glob(f"*/{n}")
        )
        cure = f"pass {' or '.join(inside[:3]) or 'a folder that holds one'}"
        raise ConfigError(f"load: {path / 'config.json'} is missing; {cure}")
    config, texts, choice = read_config(path, head, labels)
    stored_in, files = find_tensors(path, config, choice)
    handles = {file: stack.enter_context(opened(path / file)) for file in files}
    return config, texts, stored_in, handles


def _origin(stored_in: Mapping[str, StoredTensor], path: Path, config: Config) -> str | None:
    """Return the formats of a folder's tensors, and what a GGUF file does not say of a mixture.

    As in transformers, which has ``output_router_logits`` False for such files, the router's loss
    is off.
    """
    notes = [each] if (each := formats_of(stored_in)) else []
    if config.experts is not None and (path / MARK).is_file():
        known = FAMILIES[config.model_type].experts
        if known is not None and known.balanced:
            notes.append("router's loss: off, as GGUF has no coefficient for it")
    return "; ".join(notes) or None


def _kept(
    name: str,
    unread: LazyParameter,
    *,
    place: Callable[[Any], Any],
    quantizer: Quantizer | None,
    division: Division | None,
    parts: Parts | None,
    joined: Joined,
) -> Any:
    """Return what this rank keeps of a parameter, on its device; no more is read than needed."""
    home = unread.home
    quantized = home.kind is not None
    if (
        parts is not None
        and not quantized
        and not (quantizer and quantizer.makes(name, home.shape))
    ):
        own = unread.__getitem__ if division is None else partial(division.own, name, unread)
        shape = home.shape if division is None else division.shape(name)
        return place(parts.read(name, shape, own))
    if parts is not None and division is None and (by_rows := _by_rows(unread, place, quantizer)):
        return parts.read_quantized(home.shape, *by_rows)
    if division is None or (quantizer is not None and quantizer.wants_whole(name)):
        value = unread.whole()
    else:
        value = division.own(name, unread)
    placed_value = value.moved(place) if isinstance(value, Quantized) else place(value)
    placed_value = placed_value if quantizer is None else quantizer(name, placed_value)
    return joined(name, placed_value) if parts is None else parts.keep(name, placed_value)


def _by_rows(
    unread: LazyParameter, place: Callable[[Any], Any], quantizer: Quantizer | None
) -> tuple[int, Callable[[slice], Quantized]] | None:
    """Return (step, read): ``read(rows)`` returns rows of a quantized weight.

    At multiples of ``step`` rows, they are equal to those rows of the whole weight.  None: codes
    of rows depend on other rows, or the file's rows cannot be read separately.
    """
    home = unread.home
    if home.kind is None and quantizer is not None:
        return quantizer.by_rows(unread.name, home.shape, lambda rows: place(unread[rows]))
    step = None if home.kind is None or quantizer is not None else unread.step()
    return None if step is None else (step, lambda rows: unread.rows(rows).moved(place))


@check_options
def create(
    config: Mapping[str, Any],
    *,
    seed: int,
    dtype: Any = "float32",
    device: str | None = None,
    communicator: Communicator | None = None,
    pipeline: Communicator | None = None,
    chunks: int = 1,
    parts: Communicator | None = None,
    experts: Communicator | None = None,
    invariant: bool = False,
) -> Transformer:
    """Return a model with random parameters.

    Matrices are drawn from a normal distribution with a standard deviation of the config's
    ``initializer_range``; norm weights are 1, biases 0.

    Parameters
    ----------
    config : dict
        As in a Hugging Face config.json; ``model_type`` names the family.
    seed : int
        Equal seeds give equal parameters.
    dtype, device, communicator, pipeline, chunks, parts, experts, invariant
        As in ``load``.

    Returns
    -------
    model : Transformer

    Raises
    ------
    ConfigError
        The config or an option is invalid.
    DeviceError
        The device does not exist.
    """
    parsed, kind = parse(config), float_dtype("create", dtype)
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"create: seed={seed!r} must be an integer of 0 or more")
    size = sum(map(math.prod, parsed.shapes().values())) * kind.itemsize
    division = _division(parsed, communicator, pipeline, chunks, experts)
    rank_parts = None if parts is None else Parts(parts)
    for ranks in (communicator, parts):
        size //= 1 if ranks is None else ranks.size
    with on_device("create", device) as place:
        check_bytes("create: the parameters of this config: it", size, place(np.empty(0)))
        parameters: dict[str, Array] = {}
        joined = Joined(parsed, division)
        for index, (name, shape) in enumerate(parsed.shapes().items()):
            if division is not None and not division.holds(name):
                continue
            array = _drawn(parsed, name, shape, parsed.dtype_of(name, kind), [seed, index])
            own = place(array if division is None else division.own(name, array))
            own = joined(name, own) if rank_parts is None else rank_parts.keep(name, own)
            parameters[name] = own
        own_config = parsed if division is None else division.config
        model = Transformer(own_config, parameters, {"config.json": dict(text_config(config))})
        model.division, model.parts = division, rank_parts
        if division is not None and division.stages is not None:
            division.stages.dtype = kind
        return model.in_order(invariant)


DECAYS = (0.01, 16.0)  # of a token, before softplus: as transformers draws them
ONES = ("linear_attn.norm.weight", "o_norm.weight", "dt_bias", ".D")


def _drawn(config: Config, name: str, shape: Any, kind: Any, seed: list[int]) -> Array:
    """Return a new parameter: that of a norm changes nothing, biases are 0, most are random."""
    if name.endswith("A_log"):
        return np.log(np.random.default_rng(seed).uniform(*DECAYS, shape)).astype(kind)
    if name.endswith(ONES) or re.search(r"layernorm\.norms\.\d+\.weight$", name):
        return np.ones(shape, kind)
    if name.endswith("norm.weight"):
        return np.full(shape, 1 - config.norm_offset, kind)
    if name.endswith(".bias"):
        return np.zeros(shape, kind)
    if ".act_fn." in name:
        return np.full(shape, XIELU[name.rpartition(".")[2]], kind)
    array = np.random.default_rng(seed).standard_normal(shape, FLOAT32)
    return (array * FLOAT32.type(config.initializer_range)).astype(kind)


def _own_new(
    config: Config, name: str, kind: Any, seed: list[int], division: Division | None
) -> Array:
    """Return this rank's part of a new parameter."""
    array = _drawn(config, name, config.shapes()[name], kind, seed)
    own: Array = array if division is None else division.own(name, array)
    return own


def _division(
    config: Config,
    communicator: Communicator | None,
    pipeline: Communicator | None,
    chunks: int,
    experts: Communicator | None,
) -> Division | None:
    """Return the division that says which part this rank holds; None if it holds the model."""
    communicators = {"communicator": communicator, "pipeline": pipeline, "experts": experts}
    communicators = {name: comm for name, comm in communicators.items() if comm is not None}
    if not communicators:
        return None
    if experts is not None and config.head != CAUSAL:
        problem = f"it has the head {config.head!r}, and experts of language models are divided"
        raise ConfigError(f"load(experts=): {problem}; divide its tensors, blocks or batch")
    for name, comm in communicators.items():
        check_communicator(f"load({name}=)", comm)
    if not is_integer(chunks, 1):
        raise ConfigError(f"load(chunks={chunks!r}): pass an integer, 1 or more")
    stages = None if pipeline is None else Stages(config, pipeline, chunks)
    return Division(config, communicator or SingleCommunicator(), stages, experts)


@contextmanager
def on_device(call: str, device: Any) -> Iterator[Callable[[Any], Any]]:
    """Make the device the current one, and yield a function that copies an array to it."""
    if isinstance(device, str) and device == "auto":
        device, problem = resolve_device(device)
        if problem:
            say_once(f"{call}: {problem}")
    name = device if isinstance(device, str) else ""
    if device is None or name == "cpu":
        yield lambda array: array
        return
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        cure = "choose 'cpu' (NumPy, as None), 'auto', 'cuda' or 'cuda:1'"
        raise ConfigError(f"{call}: device={device!r}; {cure}")
    try:
        cupy = gpu.cupy()
    except ImportError:
        cure = "pip install 'unsloth-cupy[cuda12]', or leave device out"
        raise DeviceError(f"{call}: device={device!r} needs CuPy: {cure}") from None
    count, number = gpu.count(), int(match[1] or 0)
    if number >= count:
        names = " or ".join(["'cpu'", *(f"'cuda:{i}'" for i in range(count))])
        raise DeviceError(f"{call}: device={device!r}, but CuPy sees {count} GPUs; choose {names}")
    with cupy.cuda.Device(number):
        yield cupy.asarray
        cupy.cuda.get_current_stream().synchronize()  # any stream may read the parameters
