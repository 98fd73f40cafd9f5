"""Draft heads (multi-token prediction) against transformers' own layers, put together here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.memory.plan import plan_memory
from unsloth_cupy.models import create, from_torch, load, merge
from unsloth_cupy.models.configs.draft_heads import is_of_head, prefixes, with_blocks
from unsloth_cupy.models.configs.names import HEAD, TABLE
from unsloth_cupy.models.layers.block import embedded
from unsloth_cupy.models.layers.draft_head import draft_states
from unsloth_cupy.ops.quantized.weight import Quantized
from unsloth_cupy.parallel import Zero3

from ..parallel.threads import by_threads
from .peers import MIXTURES, SIZES, batch, make

torch = pytest.importorskip("torch", reason="torch computes the references")
pytest.importorskip("transformers", reason="transformers computes the references")

# label: config, module and class prefix of transformers, layer whose kind a head's block has
KINDS: dict[str, Any] = {
    "deepseek": (MIXTURES["deepseek_v3"], "deepseek_v3", "DeepseekV3", 2),
    "deepseek, two heads": (
        MIXTURES["deepseek_v3 yarn"] | {"num_nextn_predict_layers": 2},
        *("deepseek_v3", "DeepseekV3", 2),
    ),
    "glm": (MIXTURES["glm4_moe"], "glm4_moe", "Glm4Moe", 2),
    "qwen": (
        MIXTURES["qwen3_next"] | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        *("qwen3_next", "Qwen3Next", 3),
    ),
}
OLD = {  # names of Qwen3-Next's files
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
WEIGHT = 0.3


def config_of(label: str, **changes: Any) -> dict[str, Any]:
    """Return a config with a draft head, whose block has experts as all others."""
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": []} if label == "qwen3_next" else {}
    return SIZES | MIXTURES[label] | {"num_nextn_predict_layers": 1} | dense | changes


class Peer:
    """A model of transformers with heads of its layers."""

    def __init__(self, folder: Path, label: str) -> None:
        config, module, name, layer = KINDS[label]
        self.model = make(folder, config)
        classes = __import__(
            f"transformers.models.{module}.modeling_{module}", fromlist=["modeling"]
        )
        known, size = self.model.config, self.model.config.hidden_size
        self.qwen = module == "qwen3_next"
        torch.manual_seed(1)
        self.heads = []
        for _ in range(config.get("num_nextn_predict_layers", 1)):
            norm = getattr(classes, f"{name}RMSNorm")
            parts = {each: norm(size, eps=known.rms_norm_eps) for each in OLD if each != "eh_proj"}
            parts["eh_proj"] = torch.nn.Linear(2 * size, size, bias=False)
            block = getattr(classes, f"{name}DecoderLayer")(known, layer).eval()
            with torch.no_grad():
                for each in (*parts.values(), block):
                    for one in (*each.parameters(), *each.buffers()):
                        one.copy_(0.2 * torch.randn_like(one) + (one.ndim == 1 and not self.qwen))
            self.heads.append((parts, block))

    def tensors(self) -> dict[str, Any]:
        """Return the heads' tensors by their names in files."""
        named, first = {}, self.model.config.num_hidden_layers
        for number, (parts, block) in enumerate(self.heads, first):
            outer = inner = f"model.layers.{number}."
            if self.qwen:
                outer, inner = "mtp.", "mtp.layers.0."
            for name, part in parts.items():
                named[f"{outer}{OLD[name] if self.qwen else name}.weight"] = part.weight
            for name, value in block.state_dict().items():
                if not name.startswith("mlp.experts."):
                    named[inner + name] = value
                    continue
                for expert, one in enumerate(value):
                    gate = one.chunk(2) if name.endswith("gate_up_proj") else [one]
                    names = ("gate_proj", "up_proj") if len(gate) == 2 else ("down_proj",)
                    for own, matrix in zip(names, gate, strict=True):
                        named[f"{inner}mlp.experts.{expert}.{own}.weight"] = matrix
        return {name: value.detach().contiguous().numpy() for name, value in named.items()}

    def states(self, ids: Any) -> list[Any]:
        """Return the normalised states of the model and of each head."""
        body, count = self.model.model, ids.shape[1]
        states = [body(input_ids=ids, use_cache=False).last_hidden_state]
        places = torch.arange(count)[None].expand(ids.shape)
        angles = body.rotary_emb(states[0], places)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        following = ids
        for parts, block in self.heads:
            following = torch.cat([following[:, 1:], following[:, -1:]], 1)
            pair = parts["enorm"](body.embed_tokens(following)), parts["hnorm"](states[-1])
            x = parts["eh_proj"](torch.cat(pair, -1))
            y = block(
                x, attention_mask=mask, position_ids=places, position_embeddings=angles,
                use_cache=False,
            )  # fmt: skip
            y = y[0] if isinstance(y, tuple) else y
            states.append(parts["shared_head.norm"](y))
        return states

    def loss(self, ids: Any, labels: Any) -> Any:
        """Return the loss of DeepSeek-V3's report: all sums are divided by the same count."""
        count, total = (labels[:, 1:] != -100).sum(), torch.zeros(())
        for number, states in enumerate(self.states(ids)):
            logits = self.model.lm_head(states)[:, : -1 - number].flatten(0, 1)
            sums = torch.nn.functional.cross_entropy(
                logits, labels[:, 1 + number :].flatten(), ignore_index=-100, reduction="sum"
            )
            total = total + sums / count * (WEIGHT / len(self.heads) if number else 1)
        return total

    def gradients(self) -> dict[str, Any]:
        """Return the gradients of the heads and of what they share, by the names in memory."""
        named = {TABLE: self.model.model.embed_tokens.weight, HEAD: self.model.lm_head.weight}
        first = self.model.config.num_hidden_layers
        for number, (parts, block) in enumerate(self.heads, first):
            own = {f"{name}.weight": part.weight for name, part in parts.items()}
            own |= dict(block.named_parameters())
            named |= {f"model.layers.{number}.{name}": value for name, value in own.items()}
        return {n: value.grad.numpy() for n, value in named.items() if value.grad is not None}


def tensors_of(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: a for each in files for name, a in safetensors.numpy.load_file(each).items()}


def add(folder: Path, tensors: dict[str, Any]) -> None:
    whole = tensors_of(folder) | tensors
    safetensors.numpy.save_file(whole, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """Return the peer, our model, and the folder they come from."""
    folder = tmp_path_factory.mktemp("peer") / "model"
    peer = Peer(folder, request.param)
    add(folder, peer.tensors())
    return peer, load(folder), folder


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a new model with a head, and returns the folder."""

    def of(label: str = "deepseek_v3", **changes: Any) -> Path:
        create(config_of(label, **changes), seed=0).save(tmp_path / label)
        return tmp_path / label

    return of


# ---- files ---------------------------------------------------------------------------------------
def test_every_tensor_is_read_and_saved_under_its_name(pair, tmp_path):
    peer, model, folder = pair
    assert model.config.draft_heads == len(peer.heads)
    model.save(tmp_path / "saved")
    expected, actual = tensors_of(folder), tensors_of(tmp_path / "saved")
    assert peer.tensors().keys() <= expected.keys()
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].tobytes() == array.tobytes(), name


def test_a_merged_folder_and_an_adapter_leave_heads_as_they_are(pair, tmp_path):
    peer, _, folder = pair
    model = load(folder)
    model.add_adapter(rank=2, seed=0)
    head = tuple(prefixes(model.config))
    assert not [name for name in model.trainable if any(each in name for each in head)]
    ids, model.mtp_weight = batch(0, 8)["ids"], WEIGHT
    with pytest.raises(ConfigError, match=r"mtp_weight=0\.3 trains draft heads, which stay frozen"):
        model.loss(ids, ids)
    model.mtp_weight = 0.0
    for array in model.trainable.values():
        array[...] += 0.05
    model.save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", base=folder)
    expected, actual = tensors_of(folder), tensors_of(tmp_path / "merged")
    assert actual.keys() == expected.keys()
    changed = {name for name, array in expected.items() if (actual[name] != array).any()}
    assert changed
    assert not changed & peer.tensors().keys()


@pytest.mark.parametrize("label", ["deepseek_v3", "qwen3_next"])
def test_quantized_heads_are_saved_and_read(label, saved, tmp_path):
    model = load(saved(label, hidden_size=64, moe_intermediate_size=64), quantize="nf4")
    model.save(tmp_path / "nf4")
    again = load(tmp_path / "nf4")
    quantized = {name for name, each in model.parameters.items() if isinstance(each, Quantized)}
    assert f"{prefixes(model.config)[0]}eh_proj.weight" in quantized
    assert {n for n, each in again.parameters.items() if isinstance(each, Quantized)} == quantized
    for name in quantized:
        states = (each.parameters[name].state() for each in (again, model))
        actual, expected = ({key: np.asarray(a).tobytes() for key, a in s.items()} for s in states)
        assert actual == expected, name


@pytest.mark.parametrize("table", ["embed_tokens.weight", "shared_head.head.weight"])
@pytest.mark.parametrize("same", [True, False])
def test_tables_of_a_head_are_copies_or_its_own(same, table, saved, tmp_path):
    folder = saved()
    source = tensors_of(folder)[TABLE if "embed" in table else HEAD]
    name = f"model.layers.3.{table}"
    add(folder, {name: source if same else source * 1.5})
    model = load(folder)
    assert (name in model.parameters) == (not same)
    assert model.config.draft_copies == ((name,) if same else ())
    model.parameters[TABLE] = model.parameters[TABLE] + 1
    model.parameters[HEAD] = model.parameters[HEAD] + 1
    model.save(tmp_path / "saved")
    actual = tensors_of(tmp_path / "saved")
    assert actual.keys() == tensors_of(folder).keys()
    assert np.array_equal(actual[name], source + 1 if same else source * 1.5)
    data, model.mtp_weight = batch(0, 8)["ids"], WEIGHT
    _, gradients = model.loss_and_gradients(data, data)
    if not same:  # they have a gradient of the head's loss alone
        assert np.abs(gradients[name]).max() > 0
    model.resize(101)
    assert model.loss(data, data) > 0


def test_heads_that_are_not_whole_are_left_out_by_name(saved):
    folder = saved()
    tensors = tensors_of(folder)
    del tensors["model.layers.3.hnorm.weight"]
    (folder / "model.safetensors").unlink()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"such as model\.layers\.3\..* left out, because model"):
        model = load(folder)
    assert model.config.draft_heads == 0
    with pytest.raises(ConfigError, match=r"has no draft head .*; leave draft out"):
        model.generate(batch(0, 4)["ids"], max_new_tokens=2, draft="mtp")


def test_a_folder_without_heads_loads_without_them(saved, recwarn):
    folder = saved(num_nextn_predict_layers=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert load(folder).config.draft_heads == 0
    assert not [each for each in recwarn if "draft" in str(each.message)]


def test_models_of_torch_have_no_heads(pair):
    peer, model, _ = pair
    assert from_torch(peer.model).config.draft_heads == 0
    ids = batch(0, 8)["ids"]
    actual = model.to_torch()(input_ids=torch.tensor(ids), use_cache=False).logits.detach().numpy()
    assert np.abs(actual - model.logits(ids)).max() < 1e-4


# ---- numbers -------------------------------------------------------------------------------------
def test_states_of_heads(pair):
    peer, model, _ = pair
    ids = batch(seed=2, tokens=12)["ids"]
    with torch.no_grad():
        first, *expected = peer.states(torch.tensor(ids))
    states, following = first.numpy(), ids
    call = model.call(model.parameters, ids)
    for number, each in enumerate(expected):
        following = np.concatenate([following[:, 1:], following[:, -1:]], axis=1)
        embeddings = embedded(model.config, model.parameters, following)
        states = draft_states(call, number, states, embeddings)
        assert np.abs(states - each.numpy()).max() < 2e-5 * np.abs(each.numpy()).max() + 2e-5


@pytest.mark.parametrize("checkpoint", [None, CheckpointConfig()], ids=["kept", "recomputed"])
def test_loss_and_gradients(checkpoint, pair):
    peer, model, _ = pair
    data = batch(seed=1, tokens=20)
    ids, labels = data["ids"], data["labels none"]
    peer.model.zero_grad()
    for parts, block in peer.heads:
        for each in (*parts.values(), block):
            each.zero_grad()
    expected = peer.loss(torch.tensor(ids), torch.tensor(labels))
    expected.backward()
    model.mtp_weight = WEIGHT
    loss, gradients = model.loss_and_gradients(ids, labels, checkpoint=checkpoint)
    model.mtp_weight = 0.0
    plain, others = model.loss_and_gradients(ids, labels, checkpoint=checkpoint)
    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(
            peer.model(input_ids=torch.tensor(ids), use_cache=False).logits[:, :-1].flatten(0, 1),
            torch.tensor(labels)[:, 1:].flatten(),
        )
    balance = plain - own.item()  # of the routers
    assert loss - balance == pytest.approx(expected.item(), abs=2e-5)
    assert not any(is_of_head(model.config, name) for name in others)
    expected = peer.gradients()
    heads = {name for name in gradients if is_of_head(model.config, name)}
    assert heads == expected.keys() - {TABLE, HEAD}
    for name in expected:
        if name == TABLE and model.config.balanced:
            continue  # with the gradient of the routers' loss
        error = np.linalg.norm(gradients[name] - expected[name])
        assert error < 1e-4 * np.linalg.norm(expected[name]) + 1e-7, name


@pytest.mark.parametrize("label", ["deepseek_v3", "qwen3_next"])
def test_packed_and_padded_texts_have_the_same_loss(label):
    changes = {"output_router_logits": False} if label == "qwen3_next" else {}
    model = create(config_of(label, **changes), seed=0, dtype="float64")
    model.mtp_weight = WEIGHT
    draw, lengths = np.random.default_rng(0), (7, 1, 9, 2)
    texts = [draw.integers(3, 97, n) for n in lengths]
    packed = np.concatenate(texts)[None]
    offsets = np.cumsum([0, *lengths])
    rows = np.zeros((4, 9), int)
    mask = np.zeros((4, 9), int)
    for row, real, text in zip(rows, mask, texts, strict=True):
        row[9 - len(text) :], real[9 - len(text) :] = text, 1
    labels = np.where(mask == 1, rows, -100)
    labels[np.arange(4), 9 - np.array(lengths)] = -100
    loss, gradients = model.loss_and_gradients(packed, packed, offsets=offsets)
    other, others = model.loss_and_gradients(rows, labels, mask=mask)
    assert loss == pytest.approx(other, rel=1e-9)
    for name, array in gradients.items():
        assert np.abs(array - others[name]).max() < 1e-9 * max(1, np.abs(array).max()), name
    halves = sum(
        model.loss(text[None], text[None], count=sum(lengths) - len(lengths)) for text in texts
    )
    assert halves == pytest.approx(loss, rel=1e-9)


def test_a_plan_counts_heads():
    config = SIZES | MIXTURES["deepseek_v3"]
    options: Any = {"batch": 2, "tokens": 16, "dtype": "float32", "device": "cpu"}
    without = plan_memory(config, **options)
    kept = plan_memory(config | {"num_nextn_predict_layers": 1}, **options)
    trained = plan_memory(config | {"num_nextn_predict_layers": 1}, **options, mtp_weight=WEIGHT)
    model = create(config | {"num_nextn_predict_layers": 1}, seed=0)
    size = sum(a.nbytes for n, a in model.parameters.items() if is_of_head(model.config, n))
    assert kept.total - without.total == size
    assert trained.total - kept.total > 3 * size  # two moments, and gradients


# ---- drafts --------------------------------------------------------------------------------------
def agreeing(label: str, noise: float = 0.02, **changes: Any) -> Any:
    """Return a model whose head is often right: both look at the newest token almost alone."""
    changes |= {"eos_token_id": None, "max_position_embeddings": 2048}
    model = create(config_of(label, **changes), seed=0)
    hidden, prefix = model.config.hidden, prefixes(model.config)[0]
    for name, array in model.parameters.items():
        if name.endswith(("down_proj.weight", "o_proj.weight", "out_proj.weight", "down_proj")):
            array[...] *= noise
    wide = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)
    model.parameters[f"{prefix}eh_proj.weight"] = wide.astype(np.float32)
    return model


FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next", "glm4_moe_lite", "qwen3_5_moe_text")


@pytest.mark.parametrize("label", FAMILIES)
def test_equal_tokens_with_drafts_of_all_qualities(label):
    draw = np.random.default_rng(0)
    prompt = draw.integers(3, 97, (3, 90))
    mask = np.ones(prompt.shape, int)
    mask[0, :40] = mask[1, 84:] = 0
    options: Any = {"mask": mask, "max_new_tokens": 30, "stop": ()}
    shares = []
    for noise in (0.0, 0.1, 0.3, 1.0):
        model = agreeing(label, noise)
        expected = model.generate(prompt, **options)
        actual = model.generate(prompt, **options, draft="mtp")
        assert np.array_equal(actual, expected)
        drafts = model.drafts
        shares.append(drafts.accepted / drafts.proposed)
        assert str(drafts).endswith(f"of {drafts.proposed} drafts accepted ({shares[-1]:.0%})")
    assert shares[0] == 1
    assert any(0.1 < share < 0.9 for share in shares)  # some drafts of a row are cut


@pytest.mark.parametrize("label", ["deepseek_v3", "qwen3_next"])
def test_ends_minimum_penalty_and_long_prompts(label):
    model = agreeing(label)
    prompt = np.random.default_rng(0).integers(3, 97, (2, 600))  # more than one chunk
    plain = model.generate(prompt, max_new_tokens=24, stop=())
    for options in (
        {"stop": int(plain[0, 607])},
        {"stop": int(plain[0, 602]), "min_new_tokens": 9},
        {"repetition_penalty": 1.3, "stop": ()},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "stop": ()},
        {"max_new_tokens": 0},
    ):
        every: Any = {"max_new_tokens": 24, **options}
        expected = model.generate(prompt, **every)
        actual = model.generate(prompt, **every, draft="mtp")
        assert np.array_equal(actual, expected), options


def test_fewer_passes_are_made(monkeypatch):
    from unsloth_cupy.models.generation import draft

    model, steps = agreeing("deepseek_v3", noise=0.0), []
    step = draft.Generation.step
    monkeypatch.setattr(draft.Generation, "step", lambda self: (steps.append(1), step(self)))
    prompt = np.random.default_rng(0).integers(3, 97, (1, 5))
    model.generate(prompt, max_new_tokens=21, stop=(), draft="mtp")
    assert model.drafts.accepted == model.drafts.proposed == 10  # each gives a token
    assert len(steps) == 11


def test_with_an_adapter_and_an_invariant_model():
    model = agreeing("deepseek_v3")
    model.add_adapter(rank=2, seed=0)
    for array in model.trainable.values():
        array[...] += 0.02
    prompt = np.random.default_rng(0).integers(3, 97, (2, 9))
    for options in ({}, {"invariant": True}):
        expected = model.generate(prompt, max_new_tokens=12, stop=(), **options)
        actual = model.generate(prompt, max_new_tokens=12, stop=(), draft="mtp", **options)
        assert np.array_equal(actual, expected)


def test_rows_of_several_adapters():
    """Rows end one by one, so that steps have the adapters of the rows that are left."""
    model = agreeing("deepseek_v3")
    for number, name in enumerate("ab"):
        model.add_adapter(rank=2, seed=number, name=name, targets=["q_b_proj", "kv_b_proj"])
        for array in model.adapter.parameters.values():
            array[...] += 0.2 * np.random.default_rng(number).standard_normal(array.shape)
    rows, prompt = model.by_rows(["a", None, "b"]), np.random.default_rng(0).integers(3, 97, (3, 9))
    options: Any = {"max_new_tokens": 24, "stop": ()}
    plain = rows.generate(prompt, **options)
    options["stop"] = plain[[0, 1], [13, 18]].tolist()
    expected = rows.generate(prompt, **options)
    assert len({(row != 0).sum() for row in expected}) == 3
    actual = rows.generate(prompt, **options, draft="mtp")
    assert rows.drafts.accepted
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft": "ngram"}, "draft='ngram' must be 'mtp', or None"),
        ({"draft": "mtp", "temperature": 0.7}, "most likely tokens, temperature=0"),
        ({"draft": "mtp", "sequences": [0]}, "be None with a cache"),
    ],
)
def test_options_that_drafts_refuse(options, words):
    with pytest.raises(ConfigError, match=words):
        agreeing("deepseek_v3").generate(batch(0, 4)["ids"], max_new_tokens=2, **options)


def test_logits_with_nan_are_an_error():
    model = agreeing("deepseek_v3")
    model.parameters["model.norm.weight"][0] = np.nan
    with pytest.raises(FloatingPointError, match="the logits of new token 0 contain NaN"):
        model.generate(batch(0, 4)["ids"], max_new_tokens=2, draft="mtp")


def test_blocks_of_heads_follow_the_layers():
    config = create(config_of("qwen3_next"), seed=0).config
    whole = with_blocks(config)
    assert whole.layers == config.layers + 1
    assert whole.layer_types[-1] == "full_attention"
    assert whole.experts.sparse[-1]


# ---- ranks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["communicator", "pipeline", "experts"])
def test_ranks_that_divide_a_model_store_and_save_heads(way, saved, tmp_path):
    folder = saved()

    def work(comm: Any) -> None:
        model = load(folder, **{way: comm})
        with pytest.raises(ConfigError, match="ranks that share a model do not generate"):
            model.generate(batch(0, 4)["ids"], max_new_tokens=2, draft="mtp")
        if way != "pipeline":
            model.mtp_weight = WEIGHT
            with pytest.raises(ConfigError, match="draft heads, which ranks of tensors"):
                model.loss(batch(0, 4)["ids"], batch(0, 4)["ids"])
        model.save(tmp_path / "saved")

    by_threads(2, work)
    actual, expected = tensors_of(tmp_path / "saved"), tensors_of(folder)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(actual[name], array), name


def test_parts_of_heads_are_trained_as_the_whole(saved):
    folder = saved("qwen3_next")
    data = batch(0, 12)["ids"]
    model = load(folder)
    model.mtp_weight = WEIGHT
    expected, gradients = model.loss_and_gradients(data, data)
    prefix = prefixes(model.config)[0]

    def work(comm: Any) -> tuple[Any, Any]:
        own = load(folder, parts=comm)
        zero = Zero3(own, comm)
        own.mtp_weight = WEIGHT
        return zero.loss_and_gradients(data, data)

    results = by_threads(2, work)
    assert float(results[0][0]) == pytest.approx(float(expected), rel=1e-5)
    for name, array in gradients.items():
        if name.startswith(prefix):
            flat = np.concatenate([np.ravel(parts[name]) for _, parts in results])
            assert np.abs(flat[: array.size] - array.ravel()).max() < 1e-5, name


def test_other_tensors_of_a_head_are_left_out_by_name(saved):
    folder = saved("qwen3_next")
    add(folder, {"mtp.layers.1.input_layernorm.weight": np.ones(32, np.float32)})
    with pytest.warns(UserWarning, match=r"because mtp\.layers\.1\..* is not known"):
        assert load(folder).config.draft_heads == 0


def test_a_table_of_qwen_s_head_is_read(saved, tmp_path):
    folder = saved("qwen3_next")
    table = tensors_of(folder)[TABLE]
    for factor, own in ((2, True), (1, False)):
        add(folder, {"mtp.embed_tokens.weight": table * np.float32(factor)})
        model = load(folder)
        assert bool(model.config.draft_tables) == own
        model.save(tmp_path / str(factor))
        actual = tensors_of(tmp_path / str(factor))
        assert np.array_equal(actual["mtp.embed_tokens.weight"], table * factor)
