"""A conversation of ``generate --chat``: a turn computes only the tokens that it adds."""

from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import Engine, models
from unsloth_cupy.cli import generate
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer
from unsloth_cupy.models.text.chat import CHATML, CHATML_TOKENS

from ..models.peers import RELATIVES

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 400,
}  # fmt: skip
QUESTIONS = ("Who sees the cat?", "The dog does.", "Who?")


def model_of(folder, **values):
    tokenizer = train_tokenizer("Who sees the cat? The dog does. " * 9, 300, CHATML_TOKENS)
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0} | values
    models.create(config, seed=0).save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    model = models.load(folder)
    generate.end_answers(model)
    return model


def started(model, new=12, **options):
    options = {"temperature": 0.0, "seed": None, "cache_dtype": None} | options
    return generate.Conversation(model, (), max_new_tokens=new, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_turn_computes_its_new_tokens_alone(tmp_path, monkeypatch, temperature):
    """The last token that is drawn is computed with the next turn."""
    model, prompts, submit = model_of(tmp_path / "m"), [], Engine.submit

    def noted(engine, prompt, **options):
        prompts.append(prompt)
        return submit(engine, prompt, **options)

    monkeypatch.setattr(Engine, "submit", noted)
    seed = 5 if temperature else None
    talk, messages = started(model, temperature=temperature, seed=seed), []
    reused, ended = [], False
    for turn, question in enumerate(QUESTIONS):
        known, computed = talk.tokens, talk.engine.computed_rows if turn else 0
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": talk.reply(messages)})
        prompt, draws = prompts[-1], {} if seed is None else {"seed": seed + turn}
        assert prompt[: len(known)] == known
        added = model.tokenizer.decode(prompt[len(known) :], special_tokens=True)
        assert added.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        whole = model.generate(
            np.array([prompt]), max_new_tokens=12, temperature=temperature, **draws
        )
        new = whole[0, len(prompt) :].tolist()
        ends = model.config.end_tokens
        assert talk.tokens[len(prompt) :] == [token for token in new if token not in ends]
        held = max(len(known) - ended, 0)
        assert talk.engine.computed_rows - computed == len(prompt) - held + len(new) - 1
        ended = new[-1] not in ends  # the cache has no keys of the last token that was drawn
        reused.append(len(known))
    assert reused[0] == 0
    assert min(reused[1:]) > 20


def test_an_interrupt_ends_an_answer_alone(tmp_path, monkeypatch):
    model, steps = model_of(tmp_path / "m"), []
    talk, messages, step = started(model), [{"role": "user", "content": "Who?"}], Engine.step

    def interrupted(engine):
        steps.append(None)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        answer = talk.reply(messages)
    whole = started(model).reply(messages)
    assert answer
    assert whole.startswith(answer)
    assert whole != answer
    messages += [
        {"role": "assistant", "content": answer}, {"role": "user", "content": "And the dog?"},
    ]  # fmt: skip
    assert talk.reply(messages) == started(model).reply(messages)


def test_a_cache_that_a_model_refuses_is_an_error_before_the_first_question():
    model = models.load(Path(__file__).parents[1] / "golden" / "models" / "deepseek_v32")
    with pytest.raises(ConfigError, match="stores its keys in latent rows"):
        started(model, cache_dtype="int8")


def test_another_history_is_computed_from_its_beginning(tmp_path):
    model = model_of(tmp_path / "m")
    talk = started(model)
    talk.reply([{"role": "user", "content": "Who?"}])
    other = [{"role": "user", "content": "The dog does."}]
    assert talk.reply(other) == started(model).reply(other)


def test_a_long_conversation_gets_more_room_and_ends_at_the_positions(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "FIRST", 32)
    model = model_of(tmp_path / "m", max_position_embeddings=200)
    talk, messages, sizes = started(model), [], []

    def every():
        for number in range(30):
            messages.append({"role": "user", "content": f"Who sees {number}?"})
            messages.append({"role": "assistant", "content": talk.reply(messages)})
            sizes.append(len(talk.engine.cache.uses))

    with pytest.raises(ConfigError, match="leaves no room for an answer; start a new one"):
        every()
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 200


def test_states_are_computed_again(tmp_path):
    values = RELATIVES["falcon_h1"]
    model = model_of(tmp_path / "m", **values)
    talk, messages = started(model), []
    for question in QUESTIONS[:2]:
        messages.append({"role": "user", "content": question})
        assert talk.reply(messages) == started(model).reply(messages)
        messages.append({"role": "assistant", "content": "The dog."})
