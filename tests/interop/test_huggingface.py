"""Patched models of transformers give what they gave, in every family."""

import copy
import functools
import inspect
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy import profile  # noqa: E402
from unsloth_cupy.interop.huggingface import PARTS, _qk_norm, patch, unpatch  # noqa: E402

from ..harness.parity import EPS  # noqa: E402
from ..harness.sampling import Sample  # noqa: E402
from ..harness.whole_models import largest_error  # noqa: E402
from .families import HYBRIDS, NINE, OTHERS, SIZES, check, model_of, step, texts  # noqa: E402

SCENES = ("left", "right", "whole", "packed")
WHOLE = {"norm", "mlp", "rotary", "attention", "loss"}
SOME = Sample.one_in(3, OTHERS)
GENERATING = ("llama", "gemma3_text", "gemma4_text", "llama4_text", "gpt_oss", "mistral")
GENERATING += ("qwen3_5_text", "bamba", "mamba2")  # which keep states
ALL_EXPERTS = {"gpt_oss": 2, "llama4_text": 2, "granitemoe": 2, "olmoe": 4, "qwen3_moe": 4}


@pytest.mark.parametrize("family", [*NINE, *SOME])
def test_losses_and_gradients_are_the_models_own(family):
    model = model_of(family)
    scenes = SCENES if family in NINE or Sample.all else SCENES[Sample.day % 2 :: 2]
    before = {scene: step(model, scene) for scene in scenes}
    report = patch(model)
    after = {scene: step(model, scene) for scene in scenes}
    unpatch(model)
    for scene in scenes:
        check(after[scene], before[scene], model, scene)
    again = step(model, scenes[0])
    assert all(torch.equal(again[name], value) for name, value in before[scenes[0]].items())
    taken = report.taken.keys()
    assert "norm" in taken or "norm" in report.left
    if family in NINE:
        assert taken >= WHOLE


@pytest.mark.slow
@pytest.mark.parametrize("family", [*NINE, *OTHERS])
def test_16_bits_are_no_further_from_32_than_before(family):
    experts = ALL_EXPERTS.get(family)  # rounding may choose others: no measure of an error
    options = {} if experts is None else {"num_experts_per_tok": experts}
    for dtype in (torch.bfloat16, torch.float16):
        model = model_of(family, **options).to(dtype)
        wide = copy.deepcopy(model).float()
        exact, before = step(wide), step(model)
        taken = patch(model).taken
        assert taken == patch(wide).taken
        assert distance(step(model), exact) <= 1.25 * distance(before, exact)


def distance(actual, exact):
    return sum(float(((actual[n].float() - grad) ** 2).sum()) for n, grad in exact.items()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("family", GENERATING)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}],
    ids=["dynamic", "static", "none", "beams"],
)
def test_generated_tokens_are_equal(family, options):
    model, tokens = model_of(family).eval(), torch.arange(3, 15).repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, **options}
    plain = model.generate(tokens, **options)
    patch(model)
    assert torch.equal(model.generate(tokens, **options), plain)


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_chosen(part):
    model = model_of("qwen3")
    before = step(model)
    report = patch(model, parts=[part])
    absent = ("lora", "quantized", "experts", "router", "qk_norm", "residual", "recurrence")
    expected = {} if part in absent else {part}
    assert {*report.taken} == {*expected}
    after = step(model)
    unpatch(model)
    check(after, before, model, "left")


QK_NORMS = {
    "qwen3": "",
    "gemma3_text": "",
    "lfm2": "",
    "gemma4_text": "",
    "exaone4": "it does not always normalize and rotate, once each",
    "hunyuan_v1_dense": "it does more than normalize and rotate",
    "olmo2": "its norms are not of each head",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", QK_NORMS)
def test_norms_of_queries_and_keys_and_their_turn_are_one_pass(family):
    model = model_of(family)
    report = patch(model)
    narrow = patch(model_of(family).bfloat16())
    for each in (report, narrow):
        assert {r.reason for r in each.rows if r.part == "qk_norm"} == {QK_NORMS[family]}
    with profile() as seen:
        expected = step(model)
    turns = report.taken["rotary"]
    assert turns_alone(seen) == turns - report.taken.get("qk_norm", 0)
    named = {module: names for module in model.modules() if (names := _qk_norm.norms_of(module))}
    for module, names in named.items():  # who waits for a norm sees it
        norm = module.get_submodule(names[-1])
        norm.register_forward_hook(lambda norm, args, output: output * 1)
    with profile() as seen:
        actual = step(model)
    apart = family == "gemma4_text"  # whose queries and keys are turned by calls of their own
    assert turns_alone(seen) == (sum(map(len, named.values())) if apart else turns)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


def turns_alone(seen):
    """Return how often queries and keys were turned by an op that does not norm them too."""
    return [record.op for record in seen.records].count("rope_qk")


def test_norms_that_were_left_are_not_one_pass_with_their_turn():
    report = patch(model_of("qwen3"), parts=["qk_norm", "rotary"])
    assert report.taken == {"rotary": 2}
    assert report.left == {"qk_norm": "its norms or its rotary embedding were not replaced"}
    assert patch(model_of("qwen3"), parts=["norm", "qk_norm"]).taken == {"norm": 9}


def copied(function):
    """Decorate as ``functools.wraps`` does: the function stands in the closure."""

    @functools.wraps(function)
    def forward(*args, **options):
        calls.append(function)
        return function(*args, **options)

    calls = forward.calls = []
    return forward


def hidden(function):
    """Decorate by a function that has no closure of its own to copy."""
    held = {"function": function}

    @functools.wraps(function)
    def forward(*args, **options):
        return held["function"](*args, **options)

    return forward


@pytest.mark.parametrize("decorator", [copied, hidden], ids=lambda f: f.__name__)
def test_a_forward_is_taken_over_under_its_decorators(decorator, monkeypatch):
    model = model_of("qwen3")
    layer = type(model.model.layers[0].self_attn)
    before = step(model)
    decorated = decorator(decorator(layer.forward))
    monkeypatch.setattr(layer, "forward", decorated)
    report = patch(model)
    if decorator is copied:
        assert {"rotary", "qk_norm"} <= report.taken.keys()
        calls = decorated.calls
        calls.clear()
        check(step(model), before, model, "left")
        assert len(calls) == 2  # the decorator's work is done in each of two layers
    else:
        assert report.left["rotary"] == "a decorator of its forward cannot be copied"
        assert "qk_norm" not in report.taken
        check(step(model), before, model, "left")


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrences_and_norms_with_a_gate_are_taken(family):
    model = model_of(family)
    before = step(model)
    report = patch(model)
    taken = {(row.part, row.module) for row in report.rows if not row.reason}
    assert report.taken["recurrence"]
    assert report.left.keys().isdisjoint({"recurrence", "residual"})
    assert any(part == "norm" and name.endswith("RMSNormGated") for part, name in taken)
    with profile() as seen:
        check(step(model), before, model, "left")
    ran = {record.op for record in seen.records}
    assert {"causal_conv", "causal_conv_backward"} <= ran
    assert ran & {"gated_delta_rule_backward", "ssd_backward"}


PACKED = ("bamba", "falcon_h1", "qwen3_5_text")  # others do not tell all layers where texts end


@pytest.mark.parametrize("by", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("family", PACKED)
def test_recurrences_keep_packed_texts_apart(family, by):
    model, tokens = model_of(family), texts("whole")["input_ids"][:1]
    patch(model)
    ends = torch.tensor([0, 10, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    options = {"position_ids": torch.cat([torch.arange(10), torch.arange(14)])[None]} | lengths
    if by == "seq_idx":
        options["seq_idx"] = torch.tensor([0] * 10 + [1] * 14, dtype=torch.int32)[None]
    if by == "seq_idx" and family != "qwen3_5_text":  # whose rule is given ends alone
        options = {n: x for n, x in options.items() if n not in lengths}
    actual = model(tokens, use_cache=False, **options).logits
    alone = [model(t, use_cache=False).logits for t in (tokens[:, :10], tokens[:, 10:])]
    torch.testing.assert_close(actual, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


def test_a_recurrence_that_computes_otherwise_is_left(monkeypatch):
    model = model_of("qwen3_5_text")
    scope = vars(inspect.getmodule(type(model)))
    own = scope["torch_chunk_gated_delta_rule"]

    @functools.wraps(own)
    def other(*args, **options):
        out, final = own(*args, **options)
        return out, None if final is None else 2 * final  # which shows in its states alone

    monkeypatch.setitem(scope, "torch_chunk_gated_delta_rule", other)
    report = patch(model)
    assert report.left["recurrence"] == "torch_chunk_gated_delta_rule has other results"


@pytest.mark.parametrize("part", ["input_layernorm", "mlp"])
def test_a_part_that_may_read_a_second_argument_is_left(part, monkeypatch):
    model = model_of("llama")
    layer = model.model.layers[0]
    kind = type(layer.get_submodule(part))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, more=1.0: own(self, x * more))
    before = layer.get_submodule(part)(torch.ones(2, 64), 3.0)
    assert "its forward also reads more" in patch(model).left.values()
    assert torch.equal(layer.get_submodule(part)(torch.ones(2, 64), 3.0), before)


def test_eager_attention_that_is_asked_for_stays():
    model = model_of("llama")
    model.set_attn_implementation("eager")
    before, plain = step(model), model(**texts("left"), output_attentions=True)
    report = patch(model)
    assert "eager" in report.left["attention"]
    actual = model(**texts("left"), output_attentions=True)
    torch.testing.assert_close(actual.attentions, plain.attentions)
    check(step(model), before, model, "left")
    model.set_attn_implementation("sdpa")
    assert patch(model).taken["attention"] == 1


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_that_have_eager_attention_alone_give_its_weights(family, scene):
    model = model_of(family).eval()
    assert model.config._attn_implementation == "eager"
    plain = model(**texts(scene), output_attentions=True)
    assert patch(model).taken["attention"] == 1
    actual = model(**texts(scene), output_attentions=True)
    assert len(actual.attentions) == 2
    torch.testing.assert_close(actual.attentions, plain.attentions, rtol=1e-5, atol=1e-5)
    without = model(**texts(scene))
    torch.testing.assert_close(without.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert not without.attentions
    model.config._attn_implementation_internal = "eager"  # as a setter of it asks for
    model.config.output_attentions = True
    patch(model)
    torch.testing.assert_close(model(**texts(scene)).attentions, actual.attentions)


@pytest.mark.parametrize("scene", ["left", "right"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_a_label_that_padding_predicts_has_its_loss_and_a_warning(family, scene):
    inputs = texts(scene)
    inputs["labels"] = inputs["input_ids"]
    model = model_of(family)
    plain = model(**inputs).loss
    patch(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        masked = step(model, scene)
        assert not seen
        losses = [model(**inputs).loss for _ in range(2)]
    torch.testing.assert_close(losses, [plain, plain])
    warned = family == "gemma2"  # others have sinks, or zeros before too
    assert ["padding predicts labels" in str(each.message) for each in seen] == [True] * warned
    unpatch(model)
    check(masked, step(model, scene), model, scene)


def test_the_implementation_of_attention_is_the_users_to_switch():
    model = model_of("llama")
    before = step(model)
    for _ in range(2):
        assert patch(model).taken["attention"] == 1
        model.set_attn_implementation("eager")
        assert len(model(**texts("whole"), output_attentions=True).attentions) == 2
        assert "attention" in patch(model).left
        model.set_attn_implementation("sdpa")
        unpatch(model)
        assert model.config._attn_implementation == "sdpa"
    patch(model)
    unpatch(model)
    actual = step(model)
    assert all(torch.equal(actual[name], value) for name, value in before.items())


def test_a_report_is_a_table():
    report = patch(model_of("mixtral"))
    lines = str(report).splitlines()
    assert lines[0] == "MixtralForCausalLM"
    assert lines[2].split() == ["norm", "MixtralRMSNorm", "5", "taken"]
    assert ["experts", "MixtralExperts", "2", "taken"] in [line.split() for line in lines]
    assert ["router", "MixtralTopKRouter", "2", "taken"] in [line.split() for line in lines]
    assert report.taken["attention"] == 1
    lines = str(patch(model_of("llama4_text"))).splitlines()
    assert any(
        line.startswith("experts") and "left: its class does not let" in line for line in lines
    )


def test_evaluation_gives_logits_and_training_gives_none():
    model = model_of("gemma2")
    plain = model.eval()(**texts("whole"))
    patch(model)
    actual = model(**texts("whole"))
    torch.testing.assert_close(actual.logits, plain.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.loss, plain.loss)
    assert model.train()(**texts("whole")).logits is None
    assert model(input_ids=texts("whole")["input_ids"]).logits is not None


def test_losses_of_routers_are_added():
    model = model_of("mixtral", router_aux_loss_coef=10.0)
    before = model(**texts("whole"))
    patch(model)
    after = model(**texts("whole"))
    torch.testing.assert_close(after.loss, before.loss)
    torch.testing.assert_close(after.aux_loss, before.aux_loss)
    assert before.aux_loss > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(9)},
        {"shift_labels": texts("whole")["labels"].roll(1, 0)},
        {"logits_to_keep": torch.arange(24)},
        {"return_dict": False},
        {"ignore_index": 5},
        {"output_hidden_states": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_loss_keep_their_meaning(options):
    model = model_of("cohere")
    before = model(**texts("whole"), **options)
    patch(model)
    after = model(**texts("whole"), **options)
    torch.testing.assert_close(after[0], before[0])


def test_masks_are_not_queries_by_keys(monkeypatch):
    from unsloth_cupy.interop.huggingface import _attention

    model = model_of("gemma3_text")
    patch(model)
    seen = []
    attend = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["attention_mask"]), with_kwargs=True
    )
    monkeypatch.setattr(_attention, "sdpa_mask", None)
    for scene in SCENES:
        step(model, scene)
    attend.remove()
    assert [None if mask is None else (*mask.shape,) for mask in seen] == [
        (2, 24), (2, 24), None, (5,)
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "tokens", "local_size"), [(0, 5, None), (3, 1, None), (2, 3, 2)])
def test_masks_are_the_same_by_the_positions_of_older_versions(
    monkeypatch, first, tokens, local_size
):
    from unsloth_cupy.interop.huggingface import _attention

    def asked(*args, **options):
        return args, {name: str(value) for name, value in options.items()}

    monkeypatch.setattr(_attention, "sdpa_mask", asked)
    seen = torch.ones(2, 5, dtype=torch.bool)
    same = {"kv_length": 5, "attention_mask": seen, "local_size": local_size}
    now = _attention.mask(2, tokens, q_offset=torch.tensor(first), device="meta", **same)
    then = _attention.mask(2, cache_position=torch.arange(first, first + tokens), **same)
    if isinstance(now, torch.Tensor):
        assert torch.equal(now, then)
        assert now.shape == (2, first + tokens)
    else:
        for name, value in (
            ("q_length", tokens),
            ("q_offset", f"tensor({first})"),
            ("device", "meta"),
        ):
            assert now[1].pop(name) == str(value)
        assert then[1].pop("cache_position") == str(torch.arange(first, first + tokens))
        assert then == now


@pytest.mark.parametrize("images_see", [None, "vision"])  # the tokens of an image each other
def test_layers_that_share_keys_and_values_may_slice_masks(images_see):
    """Gemma 4 with images: such layers compute the logits of few tokens for these alone."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = SIZES | OTHERS["gemma4_text"] | {"use_bidirectional_attention": images_see}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 2}
    names = {"image_token_id": 1, "video_token_id": 2, "audio_token_id": 0, "audio_config": None}
    config = AutoConfig.for_model(
        "gemma4", text_config=text, vision_config=vision | {"pooling_kernel_size": 2}, **names
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        pixels = torch.rand(2, 16, 12).double()
    cure = patch(model, parts=["attention"]).left["attention"]
    assert 'call set_attn_implementation("sdpa") before patch' in cure
    unpatch(model)
    model.double().set_attn_implementation("sdpa")
    places = torch.tensor([[x, y] for y in range(4) for x in range(4)]).expand(2, -1, -1)
    inputs = texts("left")
    inputs["input_ids"][:, 10:14], inputs["labels"][:, 10:14] = 1, -100
    inputs |= {"pixel_values": pixels, "image_position_ids": places}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 1).long()

    def results():
        model.zero_grad()
        loss = model.train()(**inputs).loss
        loss.backward()
        given = {name: each for name, each in inputs.items() if name != "labels"}
        with torch.no_grad():
            last = [model.eval()(**given, logits_to_keep=count).logits for count in (1, 3)]
        grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        return [loss.detach().double(), *last], grads

    (numbers, gradients), most = results(), 4 * EPS["float32"]  # in which it has norms and the loss
    assert patch(model).taken["attention"] == 1
    assert patch(model, parts=["attention"]).taken == {"attention": 1}
    actual, slopes = results()
    torch.testing.assert_close(actual, numbers, rtol=most, atol=most)
    assert largest_error(slopes, gradients) <= most


def test_warnings_stay_away():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model_of("llama"))


@pytest.mark.parametrize("scale", [1 / 64, 1.0, 64.0])
def test_gradients_in_float16_are_those_of_a_mean(scale):
    """A sum over 6 rows of 1000 labels is beyond float16, its mean is not."""
    torch.manual_seed(0)
    model = model_of("llama").train()
    head = model.get_output_embeddings()
    with torch.no_grad():
        model.model.norm.weight.fill_(30.0)
        model.model.embed_tokens.weight.add_(1.0)  # hidden states share a direction
        head.weight.mul_(0.01)
    tokens = torch.randint(3, 97, (6, 1001))
    labels = torch.where(torch.arange(1001) % 3 == 0, tokens, 7)
    gradients = []
    for patched in (False, True):
        model.zero_grad()
        if patched:
            patch(model, parts=["loss"])
        with torch.autocast("cpu", torch.float16, enabled=patched):
            loss = model(input_ids=tokens, labels=labels).loss
        (loss * scale).backward()
        gradients.append(head.weight.grad)
    expected, actual = gradients
    assert 6000 * expected.abs().max() / scale > 65504, "this case tests nothing"
    most = 2e-3 * expected.abs().max().item()  # of hidden states and logits in float16
    torch.testing.assert_close(actual, expected, rtol=0, atol=most)


def test_a_loss_has_its_gradients_once():
    from unsloth_cupy.errors import GradientError

    model = model_of("llama")
    patch(model)
    loss = model(**texts("whole")).loss
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="compute the loss again"):
        loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(model(**texts("whole")).loss, loss)
