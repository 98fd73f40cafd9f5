"""lm-eval on a model of this library: the numbers of its own class for transformers."""

import json
import socket

import numpy as np
import pytest

WHY = "needs the extra `peers`"
lm_eval = pytest.importorskip("lm_eval", reason=WHY)
transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")

from lm_eval.tasks import TaskManager  # noqa: E402

import unsloth_cupy.interop.lm_eval as own  # noqa: E402
from unsloth_cupy import models  # noqa: E402
from unsloth_cupy.errors import ConfigError  # noqa: E402
from unsloth_cupy.finetune.data.tokenizer import train_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
}  # fmt: skip
ROWS = [
    {"question": "2 + 2 =", "choices": [" 4", " 5555"], "answer": 0, "text": "The cat sees. " * 20},
    {"question": "The sky is", "choices": [" old cheese", " blue"], "answer": 1, "text": "A dog."},
    {"question": "3 + 4 = ", "choices": ["7", "1111"], "answer": 0, "text": "Who?"},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
"""
CHOICE = (
    TASK
    + """
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
)
ROLLING = (
    TASK
    + """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""
)
GENERATE = (
    TASK
    + """
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
)
TASKS = {"local_choice": CHOICE, "local_rolling": ROLLING, "local_generate": GENERATE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer("Who sees the cat? The dog does. 2 + 3 " * 9, 300, ("<s>", "</s>"))
    model = models.create(CONFIG | {"vocab_size": 300, "eos_token_id": 2}, seed=0)
    for name, array in model.parameters.items():
        if "norm" not in name:
            np.multiply(array, 8, out=array)  # logits that differ
    model.save(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def manager(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(name=name, file=rows))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluated(manager, model, **arguments):
    made = lm_eval.simple_evaluate(
        model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0, log_samples=True,
        **arguments,
    )  # fmt: skip
    numbers = {
        f"{task} {name}": value
        for task, each in made["results"].items()
        for name, value in each.items()
        if isinstance(value, float)
    }
    answers = {
        (task, sample["doc_id"]): sample["filtered_resps"]
        for task, samples in made["samples"].items()
        for sample in samples
    }
    return numbers, answers


def test_tasks_have_the_numbers_of_transformers(folder, manager):
    actual, answers = evaluated(
        manager, "unsloth_cupy", model_args={"pretrained": str(folder), "device": "cpu"}
    )
    peer = {"pretrained": str(folder), "device": "cpu", "dtype": "float32"}
    expected, others = evaluated(manager, "hf", model_args=peer)
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert len(actual) >= 5
    for key, values in others.items():
        if key[0] == "local_generate":
            assert answers[key] == values
        elif key[0] == "local_choice":
            pairs = zip(answers[key], values, strict=True)
            for (log_prob, greedy), (other, is_other) in pairs:
                assert log_prob == pytest.approx(other, abs=1e-4)
                assert greedy == is_other
    assert any(answers[key][0] for key in answers if key[0] == "local_generate")


def test_a_loaded_model_is_evaluated_too(folder, manager):
    first, _ = evaluated(manager, own.Model(models.load(folder), batch_size=1))
    second, _ = evaluated(manager, own.Model(str(folder), device="cpu", batch_size=2))
    assert first == pytest.approx(second, rel=1e-5)


def test_what_has_no_meaning_is_refused(folder):
    from lm_eval.api.instance import Instance

    model = own.Model(folder, device="cpu")
    for options, match in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 64}, "64 positions")):
        request = Instance("generate_until", {}, ("a", {"until": ["b"], **options}), 0)
        with pytest.raises(ConfigError, match=match):
            model.generate_until([request])
    whole = Instance("loglikelihood", {}, ("a", "The cat " * 99), 0)
    with pytest.raises(ConfigError, match="tokens, the model 64 positions"):
        model.loglikelihood([whole], disable_tqdm=True)
    with pytest.raises(ConfigError, match="batch_size"):
        own.Model(folder, device="cpu", batch_size=0)


def test_texts_without_a_token_begin_with_the_prefix(folder):
    from lm_eval.api.instance import Instance

    model = own.Model(folder, device="cpu")
    options = {"until": ["", "e"], "max_gen_toks": 9}
    texts = [
        model.generate_until([Instance("generate_until", {}, (text, options), 0)])
        for text in ("", "<s>")
    ]
    assert texts[0] == texts[1]


def test_the_command_runs_tasks(folder, manager, tmp_path):
    from click.testing import CliRunner

    from unsloth_cupy.cli.commands import group

    files = ",".join(str(tmp_path / f"{name}.yaml") for name in ("local_choice", "local_rolling"))
    words = ["evaluate", str(folder), "--tasks", files, "--device", "cpu"]
    done = CliRunner().invoke(group, [*words, "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    numbers = {(each["task"], each["metric"]): each["value"] for each in lines[-1]}
    expected, _ = evaluated(manager, own.Model(folder, device="cpu"))
    for (task, metric), value in numbers.items():
        assert value == pytest.approx(expected[f"{task} {metric},none"], rel=1e-6)
    assert {task for task, _ in numbers} == {"local_choice", "local_rolling"}
    table = CliRunner().invoke(group, words)
    assert "acc_norm" in table.output
    for more, match in ((["--data", "x"], "leave one of them out"), (["--tasks", "no"], "no task")):
        wrong = CliRunner().invoke(group, ["evaluate", str(folder), "--tasks", "a", *more])
        assert wrong.exit_code
        assert match in wrong.output
