"""Other configs of all families against transformers itself, where it is installed."""

import numpy as np
import pytest

from unsloth_cupy.finetune.data.chat import Chat
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer
from unsloth_cupy.finetune.run.new_model import small_llama
from unsloth_cupy.models import create, load
from unsloth_cupy.models.configs.names import is_stack, parameter_name
from unsloth_cupy.models.folders.expert_files import file_tensors
from unsloth_cupy.models.text.chat import CHATML_TOKENS
from unsloth_cupy.serving.drawing import draw
from unsloth_cupy.serving.options import Options

from .peers import CONFIGS, MIXTURES, RELATIVES, batch, class_of, make

torch = pytest.importorskip("torch", reason="torch computes the references")
transformers = pytest.importorskip("transformers", reason="transformers computes the references")
ALL = CONFIGS | RELATIVES | MIXTURES


@pytest.fixture(scope="module", params=ALL)
def pair(request, tmp_path_factory):
    """Return a transformers model, ours, and the folder they come from."""
    folder = tmp_path_factory.mktemp("peer") / "model"
    peer = make(folder, ALL[request.param])
    return peer, load(folder), folder


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_loss_logits_and_gradients(pair, side):
    peer, model, _ = pair
    if side == "left" and model.config.chunk is not None:
        pytest.skip("transformers counts padding as positions of chunks; golden cases do not")
    data = batch(seed=1, tokens=20)
    mask = None if side == "none" else data[side]
    options = {}
    if mask is not None:
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        options = {"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(positions)}
    labels = data[f"labels {side}"]
    peer.zero_grad()
    ids = torch.tensor(data["ids"])
    out = peer(input_ids=ids, labels=torch.tensor(labels), use_cache=False, **options)
    out.loss.backward()
    real = np.ones(data["ids"].shape, bool) if mask is None else mask == 1
    logits = model.logits(data["ids"], mask=mask)
    assert np.abs(logits - out.logits.detach().numpy())[real].max() < 1e-4
    loss, gradients = model.loss_and_gradients(data["ids"], labels, mask=mask)
    assert abs(loss - out.loss.item()) < 1e-5
    named = ((parameter_name(n), p.grad) for n, p in peer.named_parameters())
    expected = {name: gradient.numpy() for name, gradient in named if gradient is not None}
    assert set(gradients) == set(expected)
    in_file = file_tensors(model.config)
    for name, own in gradients.items():
        turned = in_file.get(name, {}).get(name)  # gpt-oss: transformers has them as the file does
        gradient = own if turned is None else turned.of(own)
        if is_stack(name):  # without the zero experts of longcat_flash
            expected[name] = expected[name][: len(gradient)]
        error = np.linalg.norm(gradient - expected[name])
        most = 2e-4 if name.endswith("A_log") else 1e-4  # a few sums whose terms cancel
        assert error <= most * np.linalg.norm(expected[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:generate.*max_position_embeddings")
@pytest.mark.parametrize("side", ["none", "left"])
def test_greedy_tokens(pair, side):
    peer, model, folder = pair
    if side == "left" and model.config.chunk is not None:
        pytest.skip("transformers counts padding as positions of chunks; golden cases do not")
    # Anew: dynamic rope in transformers remembers the longest sequence that it ever met.
    peer = class_of(peer.config).from_pretrained(folder, attn_implementation="eager")
    peer.config.output_router_logits = False  # with a cache its loss of the router is undefined
    if model.config.lightning is not None and side == "left":
        pytest.skip("transformers decodes a minimax with the first columns of a padded mask")
    data = batch(seed=2, tokens=8)
    mask = np.ones(data["ids"].shape, np.int64) if side == "none" else data[side]
    expected = peer.generate(
        torch.tensor(data["ids"]),
        attention_mask=torch.tensor(mask),
        max_new_tokens=12,
        do_sample=False,
    )
    made = model.generate(data["ids"], mask=mask, max_new_tokens=12)
    np.testing.assert_array_equal(made, expected.numpy())


@pytest.mark.slow
def test_penalised_tokens(tmp_path):
    """Padding, on the left as transformers takes it, is nothing that a row holds."""
    peer = make(tmp_path, CONFIGS["llama"])
    data, model = batch(seed=2, tokens=8), load(tmp_path)
    made = [
        (
            model.generate(
                data["ids"], mask=data["left"], max_new_tokens=20, repetition_penalty=penalty
            ),
            peer.generate(
                torch.tensor(data["ids"]), attention_mask=torch.tensor(data["left"]),
                max_new_tokens=20, do_sample=False, repetition_penalty=penalty,
            ).numpy(),
        )
        for penalty in (0.5, 1.0, 1.8)
    ]  # fmt: skip
    for ours, theirs in made:
        np.testing.assert_array_equal(ours, theirs)
    assert len({ours.tobytes() for ours, _ in made}) == len(made)


@pytest.mark.parametrize("min_p", [None, 0.0, 0.2, 1.0])
@pytest.mark.parametrize("top_p", [None, 0.8])
@pytest.mark.parametrize("top_k", [None, 7])
def test_shares_of_tokens(top_k, top_p, min_p):
    """Draws at even distances fall on tokens in proportion to what transformers' warpers leave."""
    logits = np.random.default_rng(0).standard_normal(40) * 2
    scores = torch.tensor(logits)[None]
    warpers = [transformers.TemperatureLogitsWarper(1.3)]
    warpers += [] if top_k is None else [transformers.TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [transformers.TopPLogitsWarper(top_p)]
    warpers += [] if min_p is None else [transformers.MinPLogitsWarper(min_p)]
    for warper in warpers:
        scores = warper(None, scores)
    shares = torch.softmax(scores, -1)[0].numpy()
    options = Options(1, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    draws = 2000
    drawn = [draw(logits, options, (i + 0.5) / draws) for i in range(draws)]
    counted = np.bincount(drawn, minlength=40)
    assert (np.abs(counted - draws * shares) <= 1).all()
    assert not counted[shares == 0].any()
    assert shares[draw(logits, options, np.nextafter(1, 0))] > 0


def test_transformers_opens_a_new_model(tmp_path):
    """With what ends a text and fills a row; a padded batch goes on as rows alone do here."""
    own = train_tokenizer("some text to learn from", 300, CHATML_TOKENS)
    config = small_llama(own, 64, layers=1, hidden=32)
    assert config["intermediate_size"] == 80  # 8 / 3 of 32, rounded down to a multiple of 8
    model = create(config, seed=0)
    model.save(tmp_path)
    own.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(None)
    for name, text in chat.keep().items():
        (tmp_path / name).write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer.eos_token == tokenizer.pad_token == tokenizer.bos_token == END
    end = own.token_to_id(END)
    for settings in (peer.config, peer.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (end, end)
    prompts = ["some", "text to learn"]
    rows = tokenizer(prompts, return_tensors="pt", padding=True)
    made = peer.generate(**rows, max_new_tokens=8, do_sample=False)
    ours = model.generate(rows.input_ids, mask=rows.attention_mask, max_new_tokens=8)
    assert torch.equal(made, ours)
    said = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert text == chat.text(said, answer=True)
    assert tokenizer(text).input_ids == own.encode(text).ids


@pytest.mark.slow
def test_transformers_reads_what_we_save(pair, tmp_path):
    peer, model, _ = pair
    model.save(tmp_path / "ours")
    again = class_of(peer.config).from_pretrained(tmp_path / "ours")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, peer.state_dict()[name]), name
