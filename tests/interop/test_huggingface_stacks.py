"""Patched models inside of what people run them with: compilers, adapters, trainers, hooks."""

import copy
import importlib

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy.interop import huggingface  # noqa: E402
from unsloth_cupy.interop.huggingface import patch, unpatch  # noqa: E402
from unsloth_cupy.interop.huggingface._changes import own_forward  # noqa: E402

from . import groups  # noqa: E402
from .families import check, model_of, step, texts  # noqa: E402

COMPILED = ("qwen3", "gemma3_text", "glm", "granite", "phi3", "mixtral")
quiet = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs


def near(actual, expected, rtol=1e-4):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        most = rtol * float(value.abs().max())
        torch.testing.assert_close(actual[name], value, rtol=0, atol=max(most, 1e-7))


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("scene", ["left", "packed"])
@pytest.mark.parametrize("family", COMPILED)
def test_compiled_in_one_graph(family, scene):
    torch._dynamo.reset()
    model = model_of(family, num_hidden_layers=1)
    patch(model)
    expected = step(model, scene)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    near(step(model, scene, compiled), expected)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("qwen3", 1)])
def test_compiled_with_breaks_in_all_layers(family, layers):
    torch._dynamo.reset()
    model = model_of(family, num_hidden_layers=layers)
    patch(model)
    expected = step(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        layer.compile(backend="aot_eager")
    near(step(model), expected)


@pytest.mark.slow
@quiet
def test_a_loss_is_compiled_behind_a_break():
    torch._dynamo.reset()
    model = model_of("gemma2")
    patch(model)
    expected = step(model)
    model.model.forward = torch.compiler.disable(model.model.forward)
    near(step(model, call=torch.compile(model, backend="aot_eager")), expected)


@pytest.mark.slow
@quiet
def test_dropout_of_attention_is_drawn_anew_in_a_graph_and_again_in_a_checkpoint():
    torch._dynamo.reset()
    model = model_of("llama", attention_dropout=0.5, num_hidden_layers=1)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = {float(step(model, call=compiled)["loss"]) for _ in range(3)}
    assert len(losses) == 3
    torch.manual_seed(1)
    expected = step(model)
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    near(step(model), expected, rtol=0)


@quiet
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_checkpointed_layers_give_the_same_bits(family, reentrant):
    model = model_of(family)
    patch(model)
    layer, together = model.model.layers[1], []
    middle = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    middle.register_forward_pre_hook(
        lambda _, args, given: together.append("residual" in given), with_kwargs=True
    )
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    near(step(model), expected, rtol=0)
    assert together == [True] * 3  # the last, on the way back


@quiet
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_cache_is_not_written_by_layers_that_are_checkpointed(use_cache):
    model, cache = model_of("llama"), transformers.DynamicCache()
    plain = step(model)
    patch(model)
    model.gradient_checkpointing_enable()
    options = {"past_key_values": cache, "use_cache": use_cache}
    loss = model(**texts("left") | options).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), plain["loss"])
    assert cache.get_seq_length() == 0


def test_a_deep_copy_computes_with_its_own_weights_and_is_unpatched_alone():
    model = model_of("qwen3")
    plain = step(model)
    patch(model)
    expected, copied = step(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    near(step(copied), expected, rtol=0)
    unpatch(copied)
    near(step(copied), plain, rtol=0)
    assert "forward" in vars(model.model.norm)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_replicas_of_data_parallel_compute_with_their_own_weights(family, monkeypatch):
    replication = importlib.import_module("torch.nn.parallel.replicate")

    def sent(tensors, devices, detach=False):
        return [[t * (2 if t.requires_grad else 1) for t in tensors] for _ in devices]

    monkeypatch.setattr(replication, "_broadcast_coalesced_reshape", sent)
    model = model_of(family)

    def replica(**given):
        return replication.replicate(model, [0])[0](**given)

    expected = step(model, "left", replica)
    patch(model)
    near(step(model, "left", replica), expected)
    unpatch(model)
    near(step(model, "left", replica), expected, rtol=0)


def test_a_head_of_another_size_is_the_models_own():
    model = model_of("llama")
    patch(model)
    model.resize_token_embeddings(99, mean_resizing=False)
    actual = step(model)
    unpatch(model)
    near(actual, step(model))


def test_a_saved_model_knows_nothing_of_a_patch(tmp_path):
    model = model_of("llama")
    plain = step(model)
    patch(model)
    model.save_pretrained(tmp_path)
    assert "unsloth" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    near(step(loaded.train()), plain, rtol=1e-5)
    model.load_state_dict(loaded.state_dict())


def test_autocast_is_no_further_from_float32():
    model = model_of("llama")
    exact = step(model)

    def far():
        with torch.autocast("cpu", torch.bfloat16):
            actual = step(model)
        return sum(float(((actual[n] - grad) ** 2).sum()) for n, grad in exact.items())

    before = far()
    patch(model)
    assert far() <= 1.3 * before


class Sharded:
    """Weights that are there between the hooks of their own module alone, as ZeRO has them."""

    def __init__(self, model):
        self.whole = {}
        for module in model.modules():
            if [*module.parameters(recurse=False)]:
                module.register_forward_pre_hook(self.gather)
                module.register_forward_hook(self.scatter)
                self.scatter(module)

    def gather(self, module, *_):
        for parameter in module.parameters(recurse=False):
            if parameter in self.whole:
                parameter.data = self.whole.pop(parameter)

    def scatter(self, module, *args):
        for share in args[1:]:
            for tensor in share if isinstance(share, tuple) else (share,):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.gather(module))
        for parameter in module.parameters(recurse=False):
            self.whole[parameter] = parameter.data
            parameter.data = torch.empty(0)


def test_weights_are_read_between_the_hooks_of_their_module():
    model = model_of("qwen3")
    expected = step(model)
    patch(model)
    Sharded(model)
    near(step(model), expected)


@quiet
@pytest.mark.parametrize("checkpointed", [False, True])
def test_shards_of_fully_shard_are_whole_where_ops_read_them(tmp_path, checkpointed):
    model = model_of("qwen3")
    plain = step(model)
    assert patch(model).taken.keys() >= {"qk_norm", "residual", "loss"}
    with groups.group(str(tmp_path / "store")):
        groups.shard(model, *model.model.layers, model.lm_head)
        if checkpointed:
            model.gradient_checkpointing_enable()
        actual = step(model)
        near({n: v if n == "loss" else v.full_tensor() for n, v in actual.items()}, plain, 1e-5)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, 14),
        ({"use_dora": True}, 14),
        ({"use_rslora": True, "lora_alpha": 3}, 14),
        ({"lora_bias": True}, 0),
        ({"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}, 0),
        ({"modules_to_save": ["lm_head", "norm"]}, 14),
        ({"target_modules": ["lm_head", "q_proj"]}, 3),
    ],
    ids=["plain", "dora", "rslora", "biases", "variant", "saved-head", "adapted-head"],
)
def test_adapters_of_peft(options, layers, when):
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    settings = {"target_modules": "all-linear", "init_lora_weights": False, "r": 4, **options}
    model = model_of("llama")
    if when == "before":
        patch(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    if when == "after":
        plain, report = step(adapted), patch(adapted)
        actual = step(adapted)
        assert report.taken.get("lora", 0) == layers
        unpatch(adapted)
    else:
        actual = step(adapted)
        unpatch(adapted)
        plain = step(adapted)
    check(actual, plain, adapted, "left")
    assert all(map(own_forward, adapted.modules()))


@quiet
def test_a_trial_leaves_nothing_in_caches_of_peft():
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    helpers = pytest.importorskip("peft.helpers", reason="needs the extra `peers` (peft)")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, use_dora=True)
    model, inputs = peft.get_peft_model(model_of("llama").eval(), config).eval(), texts("whole")
    with torch.no_grad(), helpers.DoraCaching():
        expected = model(**inputs).logits
        assert patch(model, parts="lora").taken == {"lora": 14}
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
        unpatch(model)
        assert torch.equal(model(**inputs).logits, expected)


@quiet
def test_adapters_may_be_off_merged_or_dropped_out():
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    config = peft.LoraConfig(
        target_modules="all-linear", init_lora_weights=False, r=4, lora_dropout=0.5
    )
    model = peft.get_peft_model(model_of("llama"), config)
    inputs = texts("whole")
    model.eval()

    def logits():
        with torch.no_grad():
            on = model(**inputs).logits
            with model.disable_adapter():
                off = model(**inputs).logits
            model.merge_adapter()
            merged = model(**inputs).logits
            model.unmerge_adapter()
        return on, off, merged

    expected = logits()
    patch(model)
    for actual, plain in zip(logits(), expected, strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-4)
    model.train()
    torch.manual_seed(0)
    losses = {float(model(**inputs).loss) for _ in range(3)}
    torch.manual_seed(0)
    assert float(model(**inputs).loss) in losses
    assert len(losses) == 3


@pytest.mark.slow
@quiet
def test_trainer_learns_the_same(tmp_path):
    pytest.importorskip("accelerate", reason="needs the extra `peers` (accelerate)")
    rows = [{key: value[0] for key, value in texts("whole").items() if key != "use_cache"}] * 8
    losses = []
    for how in ("plain", "patched", "callback", "added"):
        model, callback = model_of("llama"), huggingface.PatchCallback()
        if how == "patched":
            patch(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
            eval_strategy="steps", eval_steps=2, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:2],
            callbacks=[callback] if how == "callback" else [],
        )  # fmt: skip
        assert (callback.report is not None) == (how == "callback")
        if how == "added":
            trainer.add_callback(callback)
        trainer.train()
        if callback.report is not None:
            assert callback.report.taken["loss"] == 1
        logs = trainer.state.log_history
        losses.append([log[key] for log in logs for key in ("loss", "eval_loss") if key in log])
        assert ("forward" in vars(model.model.norm)) == (how != "plain")
        unpatch(model)
    assert len(losses[0]) == 3
    for actual in losses[1:]:
        assert actual == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@quiet
def test_hooks_of_accelerate_come_before_or_after():
    hooks = pytest.importorskip("accelerate.hooks", reason="needs the extra `peers` (accelerate)")
    model = model_of("llama")
    plain = step(model)

    def hook():
        for module in model.modules():
            align = hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
            hooks.add_hook_to_module(module, align)

    hook()
    patch(model)
    near(step(model), plain)
    unpatch(model)
    hooks.remove_hook_from_submodules(model)
    patch(model)
    hook()
    near(step(model), plain)
    unpatch(model)
    near(step(model), plain, rtol=0)
    hooks.remove_hook_from_submodules(model)
    near(step(model), plain, rtol=0)
    assert not patch(model).left
    near(step(model), plain)
    unpatch(model)
    near(step(model), plain, rtol=0)


@quiet
def test_trl_tunes_and_prefers_the_same(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="needs the extra `peers` (trl)")
    datasets = pytest.importorskip("datasets", reason="needs the extra `peers` (trl)")
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokens = texts("whole")["input_ids"].tolist() * 2
    rows = datasets.Dataset.from_dict({"input_ids": tokens})
    pairs = datasets.Dataset.from_list(
        [{"prompt": "w4 w5 ", "chosen": f"w7 w{i}", "rejected": f"w9 w{i + 1}"} for i in range(4)]
    )
    common = {
        "per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    losses = []
    for patched in (False, True):
        model, other = model_of("llama"), model_of("llama")
        callbacks = [[huggingface.PatchCallback()] if patched else [] for _ in range(2)]
        tuning = trl.SFTConfig(str(tmp_path), max_length=None, padding_free=True, **common)
        words = tokenizer()
        adapter = peft.LoraConfig(target_modules="all-linear", init_lora_weights="olora", r=4)
        tuner = trl.SFTTrainer(
            model, tuning, train_dataset=rows, processing_class=words, peft_config=adapter,
            callbacks=callbacks[0],
        )  # fmt: skip
        preferring = trl.DPOConfig(str(tmp_path), **common)
        reference = model_of("llama")
        chooser = trl.DPOTrainer(
            other, reference, args=preferring, train_dataset=pairs, processing_class=words,
            callbacks=callbacks[1],
        )  # fmt: skip
        actual = []
        for trainer in (tuner, chooser):
            trainer.train()
            actual += [log["loss"] for log in trainer.state.log_history if "loss" in log]
        losses.append(actual)
        if patched:
            assert callbacks[0][0].report.taken["lora"] == 14
            assert callbacks[1][0].report.taken["attention"] == 1
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, 97)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
