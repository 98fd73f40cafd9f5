"""Losses of texts: TRL's own numbers, finite differences, and what is refused."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, losses
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.losses import _rows, constants, policies, preferences

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import Case, Parity
from ..machines.stand_in import gpu
from ..ops.golden_cases import both_dtypes

# The public names, as other people's programs call them.
PUBLIC = (
    "losses.preference(log_probs, mask, reference=None, *, kind='sigmoid', beta=0.1,"
    " smoothing=None, divergence=None, alpha=None, gamma=None, tau=None, ld_alpha=None,"
    " weights=None, count=None)",
    "losses.kto(log_probs, mask, reference, desirable, *, kind='kto', beta=0.1, k=None,"
    " weights=None, count=None)",
    "losses.policy(log_probs, mask, advantages, *, old=None, reference=None, kind='dapo',"
    " level=None, clip=None, cap=None, tau=None, vespo=None, beta=0.0, weighted_kl=None,"
    " weights=None, count=None)",
    "losses.nll(log_probs, mask, *, count=None)",
    "losses.reward(rewards, *, margin=None, center=0.0, count=None)",
    "losses.contrastive(queries, documents, *, scale=20.0, count=None)",
    "losses.implicit_rewards(log_probs, mask, reference=None, *, beta=0.1)",
    "losses.wpo_weights(log_probs, log_sum_squares, mask)",
    "losses.advantages(rewards, group, *, kind='grpo', scale=None, weights=None)",
    "losses.sampler_ratio(old, sampler, mask, *, kind='sequence_mask', limits=(None, 3.0))",
    "losses.high_entropy(entropy, mask, share)",
)

LOSSES = FOLDER / "losses"
PREFERENCES = [*op_cases(LOSSES, "preference")]
POLICIES = [
    case for case in op_cases(LOSSES, "policy")
    if not case.name.startswith(("advantages", "sampler"))
]  # fmt: skip
CONSTANTS = [
    case for case in op_cases(LOSSES, "policy") if case.name.startswith(("advantages", "sampler"))
]
DIVERGENCES = {"js_divergence": "js", "alpha_divergence": "alpha"}


def named(case: OpCase) -> str:
    return case.name


def inputs_of(case: OpCase, dtype: Any) -> dict[str, Any]:
    arrays = case.inputs.items()
    return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays}


@pytest.fixture
def _constants_of_any_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's cases draw what other models say of a token, also above 0."""
    monkeypatch.setattr(_rows, "ROUNDED", np.inf)


def judged(case: OpCase, dtype: Any, loss_of: Any) -> None:
    """Assert that loss and gradient of log_probs are TRL's."""
    arrays = inputs_of(case, dtype)
    tape = Tape()
    log_probs = tape.watch(arrays["log_probs"])
    loss = loss_of(log_probs, arrays)
    assert loss.value.dtype == dtype
    expected = float(case.outputs["loss"])
    assert abs(float(loss.value) - expected) <= 1e-5 * max(1, abs(expected))
    (gradient,) = tape.gradients(loss, [log_probs])
    expected_gradient = case.grads["log_probs"]
    error = np.linalg.norm(gradient - expected_gradient)
    assert error <= 1e-4 * max(np.linalg.norm(expected_gradient), 1e-30)
    assert not gradient[arrays["mask"] == 0].any() or "text" in arrays


def preference_of(kind: str, case: OpCase, log_probs: Any, arrays: dict[str, Any]) -> Any:
    """Return the loss of one kind, with the options of a case that the kind uses."""
    given = case.params
    options: dict[str, Any] = {"kind": kind, "beta": given["beta"]}
    options["ld_alpha"] = given.get("ld_alpha")
    if (kind in preferences.SMOOTHED and kind != "sigmoid") or given["family"] == "cpo":
        options["smoothing"] = given.get("smoothing") or None
    if kind in preferences.MARGINS and given.get("divergence"):
        options["divergence"] = DIVERGENCES.get(given["divergence"], given["divergence"])
        if options["divergence"] == "alpha":
            options["alpha"] = given.get("alpha")
    if kind == "simpo":
        options["gamma"] = given["gamma"]
        if given["alpha"]:
            options |= {"divergence": "alpha", "alpha": 1 - given["alpha"]}
    if kind == "discopop":
        options["tau"] = given.get("tau")
    if given.get("wpo"):
        sums = arrays["log_sum_squares"]
        options["weights"] = losses.wpo_weights(arrays["log_probs"], sums, arrays["mask"])
    return losses.preference(log_probs, arrays["mask"], arrays.get("reference"), **options)


@pytest.mark.usefixtures("_constants_of_any_sign")
@both_dtypes
@pytest.mark.parametrize("case", PREFERENCES, ids=named)
def test_preferences_are_those_of_trl(case: OpCase, dtype: Any) -> None:
    given, family = case.params, case.params["family"]

    def loss_of(log_probs: Any, arrays: dict[str, Any]) -> Any:
        mask = arrays["mask"]
        if family == "kto":
            rewards = losses.implicit_rewards(
                arrays["mismatched"], arrays["mismatched_mask"], arrays["mismatched_reference"],
                beta=1.0,
            )  # fmt: skip
            k = rewards.mean() if given["kind"] == "kto" else None
            weights = np.where(arrays["desirable"], *given["weights"])
            return losses.kto(
                log_probs, mask, arrays["reference"], arrays["desirable"], kind=given["kind"],
                beta=given["beta"], k=k, weights=weights,
            )  # fmt: skip
        chosen = arrays.get("text", mask).copy()
        chosen[len(chosen) // 2 :] = 0
        total = losses.nll(log_probs, chosen) * {"orpo": 1}.get(family, given.get("cpo_alpha", 0))
        kinds = given.get("types", [given.get("kind")])
        for kind, weight in zip(kinds, given.get("weights", [1] * len(kinds)), strict=True):
            part = losses.nll(log_probs, chosen) if kind == "sft" else None
            part = preference_of(kind, case, log_probs, arrays) if part is None else part
            total = total + part * weight
        return total

    judged(case, dtype, loss_of)


@pytest.mark.usefixtures("_constants_of_any_sign")
@both_dtypes
@pytest.mark.parametrize("case", POLICIES, ids=named)
def test_policies_are_those_of_trl(case: OpCase, dtype: Any) -> None:
    given, kind = case.params, case.params["kind"]
    options: dict[str, Any] = {"kind": kind, "count": given["count"]}
    if kind not in ("vespo", *policies.ROWS):
        options["level"] = given["level"]
    if kind in (*policies.CLIPPED, *policies.ROWS):
        options["clip"] = tuple(given["clip"])
    if kind in (*policies.CLIPPED, "cispo"):
        options["cap"] = given["cap"]
    if kind == "sapo":
        options["tau"] = tuple(given["tau"])
    if kind == "vespo":
        options["vespo"] = tuple(map(tuple, given["vespo"]))
    if given["beta"]:
        options["beta"] = given["beta"]
        if kind not in policies.ROWS:
            options["weighted_kl"] = given["weighted_kl"]

    def loss_of(log_probs: Any, arrays: dict[str, Any]) -> Any:
        mask, weights = arrays["mask"], arrays.get("weights")
        if "entropy" in arrays:
            chosen = losses.high_entropy(arrays["entropy"], mask, given["entropy"]).astype(dtype)
            weights = chosen if weights is None else chosen * weights
        more = {"reference": arrays["reference"]} if given["beta"] else {}
        return losses.policy(
            log_probs, mask, arrays["advantages"], old=arrays.get("old"), weights=weights,
            **options, **more,
        )  # fmt: skip

    judged(case, dtype, loss_of)


@pytest.mark.usefixtures("_constants_of_any_sign")
@pytest.mark.parametrize("case", CONSTANTS, ids=named)
def test_constants_are_those_of_trl(case: OpCase) -> None:
    given, arrays = case.params, case.inputs
    if case.name.startswith("sampler"):
        actual = losses.sampler_ratio(
            arrays["old"], arrays["sampler"], arrays["mask"], kind=given["kind"],
            limits=tuple(given["limits"]),
        )  # fmt: skip
        counts = arrays["mask"] if actual.shape[1] > 1 else 1
        np.testing.assert_allclose(actual * counts, case.outputs["ratio"] * counts, rtol=1e-6)
        return
    scale = {} if given["kind"] == "gdpo" else {"scale": given["scale"]}
    actual = losses.advantages(
        arrays["rewards"], given["group"], kind=given["kind"], weights=np.array(given["weights"]),
        **scale,
    )  # fmt: skip
    np.testing.assert_allclose(actual, case.outputs["advantages"], rtol=1e-6, atol=1e-9)


# ---- definitions --------------------------------------------------------------------------------
OF_PREFERENCE = {
    "beta": 0.4, "smoothing": 0.1, "divergence": "reverse_kl", "alpha": 0.5, "gamma": 0.5,
    "tau": 0.3, "ld_alpha": 1.0, "count": None,
}  # fmt: skip
OF_POLICY = {
    "level": "token", "low": 0.2, "high": 0.3, "cap": None, "tau_above": 1.0, "tau_below": 1.1,
    "power_above": 2.0, "decay_above": 3.0, "power_below": 3.0, "decay_below": 2.0, "beta": 0.0,
    "weighted_kl": False, "count": None,
}  # fmt: skip


def likely(rng: Any, rows: int = 6, tokens: int = 5) -> Any:
    """Draw log-probabilities of tokens."""
    return -rng.gamma(2.0, 0.3, (rows, tokens))


class TestPreference(Parity):
    op = "preference_forward"
    cases = (
        *(
            Case(kind, rows=6, tokens=5, arrays={"log_probs": likely}, kind=kind, **OF_PREFERENCE)
            for kind in preferences.KINDS
        ),
        *(
            Case(name, given=("reference", "weights"), rows=6, tokens=5, pairs=3, kind="robust",
                 **OF_PREFERENCE | {"divergence": name, "ld_alpha": 0.3, "count": 2.5})
            for name in preferences.DIVERGENCES
        ),
        Case("no pairs", rows=0, tokens=5, kind="sigmoid", **OF_PREFERENCE | {"count": 2.0}),
        Case("no tokens", rows=2, tokens=0, kind="ipo", **OF_PREFERENCE),
    )  # fmt: skip


class TestKto(Parity):
    op = "kto_forward"
    cases = (
        Case("kto", rows=4, tokens=5, kind="kto", beta=0.5, shift=0.3, count=None),
        Case("k, weights", given=("k", "weights"), rows=4, tokens=5, kind="kto", beta=0.5,
             shift=0.0, count=3.0),
        Case("unpaired", rows=4, tokens=5, kind="apo_zero_unpaired", beta=0.5, shift=0.0,
             count=None),
        Case("none", rows=0, tokens=5, kind="kto", beta=0.5, shift=0.0, count=2.0),
    )  # fmt: skip


def policy_case(kind: str, level: str = "token") -> Case:
    return Case(
        f"{kind}, {level}", given=("old", "weights"), rows=4, tokens=5, kind=kind,
        arrays={"advantages": lambda rng: rng.standard_normal(4),
                "weights": lambda rng: rng.random((4, 1))},
        **OF_POLICY | {"level": level, "cap": 1.2 if kind == "cispo" else None},
    )  # fmt: skip


class TestPolicy(Parity):
    op = "policy_forward"
    cases = (
        *(policy_case(kind) for kind in (*policies.CLIPPED, "sapo", *policies.ROWS)),
        *(policy_case(kind, "sequence") for kind in (*policies.CLIPPED, "sapo")),
        Case("of tokens, divergence", given=("old", "reference"), rows=4, tokens=5, kind="grpo",
             **OF_POLICY | {"beta": 0.3, "weighted_kl": True, "cap": 1.25, "count": 7.0}),
        Case("none", rows=0, tokens=5, kind="dapo", **OF_POLICY | {"count": 2.0}),
    )  # fmt: skip


class TestPolicyOfConstantRatios(Parity):
    """Their gradient is not that of the number: TRL's cases judge it."""

    op = "policy_forward"
    cases = (policy_case("cispo"), policy_case("vespo"))
    test_gradient_matches_finite_differences = None


class TestNll(Parity):
    op = "nll_forward"
    cases = (
        Case("mean", rows=3, tokens=5, count=None),
        Case("count", rows=3, tokens=5, count=40.0),
        Case("none", rows=0, tokens=5, count=2.0),
    )


class TestReward(Parity):
    op = "reward_forward"
    cases = (
        Case("pairs", rows=6, center=0.0, count=None),
        Case("margin", given=("margin",), rows=6, pairs=3, center=0.1, count=2.0),
        Case("none", rows=0, center=0.0, count=2.0),
    )


class TestContrastive(Parity):
    op = "contrastive_forward"
    cases = (
        Case("as many", rows=4, candidates=4, dim=3, scale=2.0, count=None),
        Case("more", rows=4, candidates=7, dim=3, scale=2.0, count=9.0),
        Case("none", rows=0, candidates=0, dim=3, scale=2.0, count=2.0),
    )


class TestImplicitRewards(Parity):
    op = "implicit_rewards_forward"
    cases = (Case("of rows", given=("reference",), rows=3, tokens=5, beta=0.3),)


class Constant(Parity):
    test_gradient_matches_finite_differences = None


class TestAdvantages(Constant):
    op = "advantages_forward"
    cases = (
        *(
            Case(f"{kind}, {scale}", given=("weights",), rows=6, functions=2, group=3, kind=kind,
                 scale=scale)
            for kind in ("grpo", "gdpo", "rloo") for scale in ("group", "batch", "none")
        ),
        Case("none", rows=0, functions=1, group=3, kind="grpo", scale="batch"),
    )  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_weights_are_what_other_functions_return(library: str) -> None:
    """Those of a policy may be the tokens that ``high_entropy`` chooses; True is 1."""
    if library == "jax":
        place = pytest.importorskip("jax.numpy", reason="jax is a peer").asarray
    elif library == "torch":
        place = pytest.importorskip("torch", reason="torch is a peer").tensor
    else:
        place = np.asarray
    rng = np.random.default_rng(3)
    values, mask = rng.random((4, 5)).astype("f"), np.arange(5) < np.array([[5], [3], [1], [4]])
    table = rng.random((4, 2)).astype("f")
    log_probs, counted = place(-values), place(mask)
    chosen = losses.high_entropy(place(values), counted, 0.5)
    assert 0 < np.asarray(chosen).sum() < mask.sum()
    as_float = place(np.asarray(chosen).astype("f"))
    pairs, rows = place(np.array([True, False])), place(np.array([True, False, True, True]))
    floats = [place(np.asarray(each).astype("f")) for each in (pairs, rows)]
    gains, desirable = place(values[:, 0]), place(np.array([True, True, False, True]))
    for actual, expected in (
        [losses.policy(log_probs, counted, gains, weights=w) for w in (chosen, as_float)],
        [
            losses.preference(log_probs, counted, weights=w, kind="simpo")
            for w in (pairs, floats[0])
        ],
        [
            losses.kto(log_probs, counted, log_probs * 2, desirable, weights=w)
            for w in (rows, floats[1])
        ],
        [
            losses.advantages(place(table), 2, weights=w)
            for w in ([1, 0.25], place(np.array([1, 0.25], "f")))
        ],
    ):
        assert type(actual) is type(expected)
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    for wrong in (["1", 2.0], [[1.0], [2.0]], [None, 1]):
        with pytest.raises(ConfigError, match=r"advantages\(weights=.*pass a number per function"):
            losses.advantages(place(table), 2, weights=wrong)
    with pytest.raises(ShapeError, match="weights"):
        losses.advantages(place(table), 2, weights=[1.0, 2.0, 3.0])


class TestSamplerRatio(Constant):
    op = "sampler_ratio_forward"
    cases = tuple(
        Case(kind, rows=3, tokens=5, kind=kind, least=0.5, most=1.5)
        for kind in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
    )


class TestHighEntropy(Constant):
    op = "high_entropy_forward"
    cases = (
        Case("a third", rows=3, tokens=5, share=0.3),
        Case("none", rows=0, tokens=5, share=0.3),
    )
    test_any_strides = None  # its results are not floats


class TestWpoWeights(Constant):
    op = "wpo_weights_forward"
    cases = (Case("of pairs", rows=4, tokens=5),)


# ---- properties ---------------------------------------------------------------------------------
def test_what_a_mask_hides_may_hold_anything() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((4, 6)) < 0.7
    clean, dirty = (np.where(mask, likely(rng, 4, 6), fill) for fill in (0, np.nan))
    dirty[mask] = clean[mask]
    for kind in preferences.KINDS:
        reference = None if kind == "orpo" else (clean - 0.1, dirty - 0.1)
        sides = []
        for side, log_probs in enumerate((clean, dirty)):
            tape = Tape()
            watched = tape.watch(log_probs)
            known = None if reference is None else reference[side]
            loss = losses.preference(watched, mask, known, kind=kind)
            sides.append((loss.value, tape.gradients(loss, [watched])[0]))
        np.testing.assert_array_equal(sides[0][0], sides[1][0])
        np.testing.assert_array_equal(sides[0][1], sides[1][1])
        assert not sides[1][1][~mask].any()


def test_parts_of_a_batch_add_up() -> None:
    rng = np.random.default_rng(0)
    log_probs, reference = likely(rng, 8, 6), likely(rng, 8, 6)
    mask = rng.random((8, 6)) < 0.7
    whole = losses.preference(log_probs, mask, reference)
    halves = ([0, 1, 4, 5], [2, 3, 6, 7])
    parts = [losses.preference(log_probs[i], mask[i], reference[i], count=4) for i in halves]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)
    gains = rng.standard_normal(8)
    whole = losses.policy(log_probs, mask, gains, old=reference)
    count = int(mask.sum())
    parts = [losses.policy(log_probs[i], mask[i], gains[i], old=reference[i], count=count)
             for i in halves]  # fmt: skip
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)


def test_extreme_log_probs_give_finite_losses() -> None:
    """Sums of hundreds, of either sign, in float32: no overflow, no NaN."""
    mask = np.ones((4, 2), bool)
    for size in (300, 3000):
        log_probs = np.float32([[-1, -1], [-size, -1], [-size, -size], [-2, 0]])
        known = np.float32([[-size, -1], [-1, -1], [-1, -1], [-size, 0]])
        for kind in preferences.KINDS:
            tape = Tape()
            watched = tape.watch(log_probs)
            loss = losses.preference(watched, mask, None if kind == "orpo" else known, kind=kind)
            (gradient,) = tape.gradients(loss, [watched])
            assert np.isfinite(loss.value), kind
            assert np.isfinite(gradient).all(), kind


def test_the_first_step_on_policy_is_the_gradient_of_the_policy() -> None:
    """Without ``old`` the ratio is 1: each token gets -A / tokens."""
    mask, gains = np.ones((2, 3)), np.array([1.0, -2.0])
    tape = Tape()
    log_probs = tape.watch(np.full((2, 3), -0.7))
    loss = losses.policy(log_probs, mask, gains)
    (gradient,) = tape.gradients(loss, [log_probs])
    np.testing.assert_allclose(gradient, np.repeat(-gains[:, None] / 6, 3, axis=1))


A = np.full((4, 3), -1.0)
M = np.ones((4, 3), bool)
BROKEN = A.copy()
BROKEN[1, 2] = -np.inf


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: losses.preference(A, M, kind="dpo"), "kind='dpo'; choose from sigmoid, hinge"),
        (lambda: losses.preference(A, M, kind="dpo", smoothing=0.1), "kind='dpo'; choose from sig"),
        (lambda: losses.preference(A, M, kind="hinge", smoothing=0.1), "'hinge' does not use smoo"),
        (lambda: losses.preference(A, M, alpha=0.5), "divergence=None does not use alpha; leave"),
        (lambda: losses.preference(A, M, kind="apo_zero", divergence="js"), "not use divergence"),
        (lambda: losses.preference(A, M, A, kind="orpo"), "'orpo' does not use reference"),
        (lambda: losses.preference(A, M, kind="aot", weights=A[0]), "does not use weights"),
        (
            lambda: losses.preference(A, M, divergence="alpha", alpha=1),
            "divergence='reverse_kl' is",
        ),
        (lambda: losses.preference(A, M, divergence="kl"), "divergence='kl'; choose from reverse"),
        (lambda: losses.preference(A, M, ld_alpha=1.5), r"ld_alpha must be in \[0, 1\]"),
        (lambda: losses.preference(A, M, ld_alpha=-0.5), r"ld_alpha must be in \[0, 1\]"),
        (lambda: preferences.preference_forward(A, M, kind="a"), "kind='a'; choose from sigmoid"),
        (lambda: losses.preference(A, M, beta=0.0), "beta must be above 0"),
        (lambda: losses.preference(A, M, kind="robust", smoothing=0.5), r"in \[0, 0.5\)"),
        (lambda: losses.preference(A, M, kind="exo_pair", smoothing=0.0), "exo_pair needs one"),
        (lambda: losses.preference(BROKEN, M), "log_probs holds -inf at row 1, token 2, which"),
        (lambda: losses.kto(A, M, A, M[:, 0], kind="apo_zero_unpaired", k=1.0), "not use k"),
        (lambda: losses.policy(A, M, A[:, 0], kind="cispo"), "'cispo' needs cap, the largest"),
        (lambda: losses.policy(A, M, A[:, 0], kind="vespo", clip=(0.1, 0.1)), "not use clip"),
        (lambda: losses.policy(A, M, A[:, 0], clip=0.2), "clip=0.2 must be two numbers"),
        (lambda: losses.policy(A, M, A[:, 0], clip=(-0.1, 0.2)), r"clip\[0\] must be 0 or more"),
        (lambda: losses.policy(A, M, A[:, 0], beta=0.1), r"beta=0.1\): pass reference"),
        (lambda: losses.policy(A, M, A[:, 0], reference=A), "beta=0 does not use reference"),
        (lambda: losses.policy(A, M, A[:, 0], weighted_kl=True), "beta=0 does not use weighted_kl"),
        (lambda: losses.policy(A, M, A[:, 0], level="row"), "level='row'; choose from token, seq"),
        (lambda: constants.advantages_forward(A[:, 0], kind="a"), "kind='a'; choose from grpo"),
        (lambda: losses.advantages(A[:, 0], 4, kind="gdpo", scale="group"), "not use scale"),
        (lambda: losses.advantages(A[:, 0], 4, kind="rloo", scale="group"), "choose from none, b"),
        (lambda: losses.advantages(-BROKEN[:, 2], 2), "holds an infinity in row 1; pass NaN"),
        (lambda: losses.advantages(A[:, 0], 1), r"group=1\): it must be 2 or more"),
        (lambda: losses.advantages(A[:, 0], 1, kind="rloo"), "the advantage of a single comp"),
        (lambda: losses.high_entropy(A, M, 1.5), r"share must be in \[0, 1\]"),
        (lambda: losses.sampler_ratio(A, A, M, limits=3.0), r"limits=3.0 must be \(least, most\)"),
        (lambda: losses.sampler_ratio(A, A, M, limits=(3.0, 1.0)), "leave no ratio between them"),
        (lambda: losses.sampler_ratio(A, A - np.inf, M), "sampler holds -inf at row 0, token 0"),
        (lambda: losses.reward(A[:, 0], center=-1.0), "center must be 0 or more"),
        (lambda: losses.nll(A, M, count=0), "count must be above 0"),
        (lambda: losses.nll(A, np.where(M, 5, -100)), "mask holds 5; pass True or 1 for tokens"),
        (lambda: losses.nll(A, [[1, 0, 1], [0, 7, 1], [0, 5, 0], [1, 1, 1]] + 0 * A), "holds 7.0;"),
        (lambda: losses.nll(A, A * np.nan), "mask holds nan"),
        (lambda: losses.kto(A, M, A, M[:, 0], k=np.nan), r"kto\(k=nan\): k must be a finite"),
    ],
)
def test_bad_options(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_mask_of_texts_is_no_mask() -> None:
    with pytest.raises(DTypeError, match="mask is <U1; pass an array of True and False, or of 1"):
        losses.nll(A, np.full((4, 3), "x"))


MEANS = (
    lambda n, count: losses.nll(A[:n], M[:n], count=count),
    lambda n, count: losses.preference(A[:n], M[:n], count=count),
    lambda n, count: losses.policy(A[:n], M[:n], A[:n, 0], count=count),
    lambda n, count: losses.kto(A[:n], M[:n], A[:n], M[:n, 0], count=count),
    lambda n, count: losses.reward(A[:n, 0], count=count),
    lambda n, count: losses.contrastive(A[:n], A, count=count),
)


@pytest.mark.parametrize("call", MEANS)
def test_a_part_of_a_batch_may_have_no_rows(call: Any) -> None:
    assert call(0, 4) == 0
    assert call(4, 4) != 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: losses.preference(A[:3], M[:3]), "3 rows are not pairs; the first half are the"),
        (lambda: losses.preference(A, M[:, :2]), r"mask has tokens=2; it must be 3"),
        (lambda: losses.preference(A, M, weights=A[:, 0]), "weights has 4 numbers for 2 pairs"),
        (
            lambda: losses.policy(A, M, A, kind="rloo"),
            r"advantages of kind='rloo' must be \(rows,\)",
        ),
        (lambda: losses.policy(A, M, A[:, 0], kind="gmpo", weights=A), r"must be \(rows, 1\)"),
        (lambda: losses.advantages(A[:, 0], 2, weights=[1, 2]), "2 numbers for 1 functions"),
        (lambda: losses.advantages(A[:, 0], 3), "4 rows are not whole groups of 3"),
        (lambda: losses.reward(A[:3, 0]), "3 rows are not pairs"),
        (lambda: losses.reward(A[:, 0], margin=A[:, 0]), "margin has 4 numbers for 2 pairs"),
        (lambda: losses.contrastive(A, A[:3]), "3 documents for 4 queries; pass at least as many"),
        (lambda: losses.wpo_weights(A[:3], A[:3], M[:3]), "3 rows are not pairs"),
        *((lambda call=call: call(0, None), "no rows have no mean; leave") for call in MEANS),
    ],
)
def test_shapes_that_do_not_fit(call: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "expected", "actual"),
    [
        (lambda: losses.nll(A[:0], M[:0]), "a row", 0),
        (lambda: losses.reward(A[:3, 0]), "an even number of rows", 3),
        (lambda: losses.reward(A[:, 0], margin=A[:, 0]), (2,), (4,)),
        (lambda: losses.preference(A, M, weights=A[:, 0]), (2,), (4,)),
        (lambda: losses.advantages(A[:, 0], 3), "a multiple of 3", 4),
        (lambda: losses.advantages(A[:, 0], 2, weights=A[:, 0]), (1,), (4,)),
        (lambda: losses.contrastive(A, A[:3]), 4, 3),
    ],
)
def test_errors_have_both_shapes(call: Any, expected: Any, actual: Any) -> None:
    with pytest.raises(ShapeError) as error:
        call()
    assert (error.value.expected, error.value.actual) == (expected, actual)


ONES, ROWS = np.ones(4, np.float32), np.full((4, 3), -1.0, np.float32)
COUNTED, GOOD = np.ones((4, 3), bool), np.array([True, False, True, False])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("call", "name", "like"),
    [
        (lambda x: losses.preference(x, COUNTED, ROWS), "log_probs", ROWS),
        (lambda x: losses.preference(ROWS, COUNTED, x), "reference", ROWS),
        (lambda x: losses.preference(ROWS, COUNTED, ROWS, weights=x[:2]), "weights", ONES),
        (lambda x: losses.kto(x, COUNTED, ROWS, GOOD), "log_probs", ROWS),
        (lambda x: losses.kto(ROWS, COUNTED, x, GOOD), "reference", ROWS),
        (lambda x: losses.kto(ROWS, COUNTED, ROWS, GOOD, weights=x), "weights", ONES),
        (lambda x: losses.kto(ROWS, COUNTED, ROWS, GOOD, k=x[1:2].reshape(())), "k", ONES),
        (lambda x: losses.policy(x, COUNTED, ONES), "log_probs", ROWS),
        (lambda x: losses.policy(ROWS, COUNTED, x), "advantages", ONES),
        (lambda x: losses.policy(ROWS, COUNTED, x), "advantages", ROWS),
        (lambda x: losses.policy(ROWS, COUNTED, ONES, old=x), "old", ROWS),
        (lambda x: losses.policy(ROWS, COUNTED, ONES, reference=x, beta=1.0), "reference", ROWS),
        (lambda x: losses.policy(ROWS, COUNTED, ONES, weights=x), "weights", ROWS),
        (lambda x: losses.policy(ROWS, COUNTED, ONES, weights=x[:, None]), "weights", ONES),
        (lambda x: losses.nll(x, COUNTED), "log_probs", ROWS),
        (losses.reward, "rewards", ONES),
        (lambda x: losses.reward(ONES, margin=x[:2]), "margin", ONES),
        (lambda x: losses.contrastive(x, ROWS), "queries", ROWS),
        (lambda x: losses.contrastive(ROWS, x), "documents", ROWS),
        (lambda x: losses.implicit_rewards(x, COUNTED), "log_probs", ROWS),
        (lambda x: losses.implicit_rewards(ROWS, COUNTED, x), "reference", ROWS),
        (lambda x: losses.wpo_weights(x, ROWS, COUNTED), "log_probs", ROWS),
        (lambda x: losses.wpo_weights(ROWS, x, COUNTED), "log_sum_squares", ROWS),
        (lambda x: losses.sampler_ratio(x, ROWS, COUNTED), "old", ROWS),
        (lambda x: losses.high_entropy(x, COUNTED, 0.5), "entropy", ROWS),
        (lambda x: losses.advantages(ONES, 2, weights=x[1:2]), "weights", ONES),
    ],
)
def test_numbers_that_are_not_finite_are_named(
    call: Any, name: str, like: Any, wrong: float
) -> None:
    x = like.copy()
    x[1] = wrong
    with pytest.raises(ConfigError, match=rf"{name} holds {wrong}( at |;)"):
        call(x)


LOG_PROBS: tuple[tuple[Any, str], ...] = (
    (losses.nll, "log_probs"),
    *(
        (lambda x, m, kind=kind: losses.preference(x, m, kind=kind), "log_probs")
        for kind in preferences.KINDS
    ),
    (lambda x, m: losses.preference(-m.astype("f"), m, x), "reference"),
    (lambda x, m: losses.kto(x, m, -m.astype("f"), m[:, 0]), "log_probs"),
    (lambda x, m: losses.kto(-m.astype("f"), m, x, m[:, 0]), "reference"),
    *((lambda x, m, kind=kind: policy_of(kind, x, m), "log_probs") for kind in policies.KINDS),
    (lambda x, m: policy_of("dapo", -m.astype("f"), m, old=x), "old"),
    (lambda x, m: policy_of("dapo", -m.astype("f"), m, reference=x, beta=0.1), "reference"),
    (losses.implicit_rewards, "log_probs"),
    (lambda x, m: losses.implicit_rewards(-m.astype("f"), m, x), "reference"),
    (lambda x, m: losses.wpo_weights(x, -m.astype("f"), m), "log_probs"),
    (lambda x, m: losses.wpo_weights(-m.astype("f"), x, m), "log_sum_squares"),
    (lambda x, m: losses.sampler_ratio(x, -m.astype("f"), m), "old"),
    (lambda x, m: losses.sampler_ratio(-m.astype("f"), x, m), "sampler"),
)


def policy_of(kind: str, log_probs: Any, mask: Any, **options: Any) -> Any:
    gains = 1 - 2 * (mask[:, 0] * 1.0)
    return losses.policy(
        log_probs, mask, gains, kind=kind, cap=5.0 if kind == "cispo" else None, **options
    )


@pytest.mark.parametrize(("call", "name"), LOG_PROBS)
def test_log_probabilities_above_0_are_refused_and_rounding_is_not(call: Any, name: str) -> None:
    """On a GPU, whose arrays the host does not read, results are NaN; hidden ones may be any."""
    x, hidden = ROWS.copy(), COUNTED.copy()
    hidden[1, 2] = False
    for size in (0.0, 1e-7, 2e-4, 2e-3, 0.1, 1.0):
        x[1, 2] = size
        assert np.isfinite(call(x, hidden)).all()
        if size < _rows.ROUNDED:
            assert np.isfinite(call(x, COUNTED)).all()
            continue
        with pytest.raises(ConfigError, match=rf"{name} holds {size:g} at row 1, token 2, above 0"):
            call(x, COUNTED)
    with gpu() as machine:
        machine.strict = False
        assert np.isnan(call(*map(machine.place, (x, COUNTED))).get()).any()


@pytest.mark.parametrize("kind", policies.ROWS)
def test_weights_of_rows_multiply_their_terms_but_not_the_divergence(kind: str) -> None:
    rng = np.random.default_rng(0)
    log_probs, old, reference = (likely(rng, 4, 5) for _ in range(3))
    mask, gains, weights = rng.random((4, 5)) < 0.7, rng.standard_normal(4), rng.random((4, 1))
    options = {"reference": reference, "beta": 0.3} if kind == "gmpo" else {}

    def both(gains: Any, weights: Any = None) -> list[Any]:
        tape = Tape()
        watched = tape.watch(log_probs)
        loss = losses.policy(watched, mask, gains, old=old, kind=kind, weights=weights, **options)
        return [loss.value, *tape.gradients(loss, [watched])]

    rows = [both(np.eye(4)[i] * gains) for i in range(4)]
    alone = both(0 * gains)  # the divergence
    for actual, divergence, *parts in zip(both(gains, weights), alone, *rows, strict=True):
        terms = sum(w * (part - divergence) for w, part in zip(weights, parts, strict=True))
        np.testing.assert_allclose(actual, divergence + np.reshape(terms, actual.shape), rtol=1e-9)


def test_weights_that_a_mask_hides_may_hold_anything() -> None:
    hidden, weights = COUNTED.copy(), np.full((4, 3), 0.5, np.float32)
    hidden[:, 2] = False
    expected = losses.policy(ROWS, hidden, ONES, weights=weights)
    weights[:, 2] = np.nan
    assert losses.policy(ROWS, hidden, ONES, weights=weights) == expected


def test_a_ratio_at_a_limit_is_kept() -> None:
    sampler = ROWS - np.log(np.float32([1, 2, 4]))  # ratios of 1, 2 and 4
    ratio = np.exp(ROWS - sampler)
    _, two, four = ratio[0]
    for least, most, expected in (
        *((two, four, [0, 1, 1]), (None, two, [1, 1, 0]), (two, two, [0, 1, 0])),
    ):
        kept = losses.sampler_ratio(ROWS, sampler, COUNTED, kind="token_mask", limits=(least, most))
        np.testing.assert_array_equal(kept, ratio * expected)


@pytest.mark.parametrize(
    ("kind", "divisor"), [("dapo", 1), ("grpo", 2), ("luspo", 2), ("dr_grpo", 6), ("bnpo", 1)]
)
def test_what_a_policy_divides_by(kind: str, divisor: int) -> None:
    """Of two rows of three tokens, one token counts, whose ratio is 1."""
    mask = np.array([[True, False, False], [False] * 3])
    assert losses.policy(A[:2], mask, A[:2, 0], kind=kind) == 1 / divisor


def test_a_token_alone_is_a_mean() -> None:
    mask = np.arange(12).reshape(4, 3) == 5
    tape = Tape()
    log_probs = tape.watch(A)
    loss = losses.nll(log_probs, mask)
    assert loss.value == 1
    np.testing.assert_array_equal(tape.gradients(loss, [log_probs])[0], -1.0 * mask)


@pytest.mark.parametrize("kind", [*policies.CLIPPED, *policies.ROWS])
def test_a_policy_clips_as_its_docstring_says(kind: str) -> None:
    """With ratios on both sides of the limits."""
    old = A - np.linspace(-0.6, 0.6, 12).reshape(4, 3)

    def of(**options: Any) -> Any:
        return losses.policy(A, M, np.array([1.0, -1, 2, -2]), old=old, kind=kind, **options)

    assert of() == of(clip=(0.2, 0.2))
    assert of() != of(clip=(0.2, 0.4))
    assert of() != of(clip=(0.4, 0.2))


def test_exo_pair_smooths_by_a_thousandth() -> None:
    pairs = ROWS * np.arange(1, 5)[:, None]
    plain = losses.preference(pairs, COUNTED, kind="exo_pair")
    assert plain == losses.preference(pairs, COUNTED, kind="exo_pair", smoothing=1e-3)


def test_defaults_of_preferences_are_those_of_the_docstring() -> None:
    pairs = ROWS * np.arange(1, 5)[:, None]
    plain = losses.preference(pairs, COUNTED, divergence="alpha")
    assert plain == losses.preference(pairs, COUNTED, divergence="alpha", alpha=0.5)


def test_a_certain_text_has_no_gradient_of_odds() -> None:
    """The odds of a probability of 1 are infinite; float32's largest one is a constant."""
    tape = Tape()
    pairs = tape.watch(np.concatenate([0 * ROWS[:2], ROWS[:2]]))
    (gradient,) = tape.gradients(losses.preference(pairs, COUNTED, kind="orpo"), [pairs])
    assert not gradient[:2].any()
    assert (gradient[2:] > 0).all()


@pytest.mark.parametrize("options", [{"divergence": "forward_kl"}, {"divergence": "alpha"}])
def test_beyond_the_largest_exponent_a_divergence_is_constant(options: Any) -> None:
    alpha = {"alpha": -1.0} if options["divergence"] == "alpha" else {}  # its exponent is -2 r
    last = 41 if alpha else 81  # r = 1 - size; the limit itself has a slope, as of torch.clamp
    for size, moves in ((30, True), (last, True), (last + 0.25, False), (100, False)):
        tape = Tape()
        pairs = tape.watch(np.array([[-size], [-1.0]]))
        loss = losses.preference(pairs, M[:2, :1], A[:2, :1], kind="ipo", **options, **alpha)
        assert tape.gradients(loss, [pairs])[0][0].any() == moves


@pytest.mark.parametrize(
    ("divergence", "f"),
    [
        ("reverse_kl", lambda r: r),
        ("forward_kl", lambda r: 1 - np.exp(-r)),
        ("js", lambda r: np.log(2) - np.log1p(np.exp(-r))),
        ("alpha", lambda r: (np.exp(-0.5 * r) - 1) / -0.5),
    ],
)
@pytest.mark.parametrize("kind", ["ipo", "sigmoid_norm"])
def test_divergences_of_texts_of_unequal_lengths(kind: str, divergence: str, f: Any) -> None:
    """Where each is divided by its length, what f adds to both is not the same."""
    mask = np.array([[True, True, True], [True, False, False]])
    margin = f(-3.0) / 3 - f(-1.0)
    expected = (margin - 5) ** 2 if kind == "ipo" else np.log1p(np.exp(-0.1 * margin))
    actual = losses.preference(A[:2], mask, kind=kind, divergence=divergence)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("clip", [(0.0, 0.2), (0.2, 0.0)])
def test_a_ratio_at_a_limit_of_the_clip_moves(clip: Any) -> None:
    """The slope there is that of torch.clamp, where the cap is below and the advantage too."""
    tape = Tape()
    log_probs = tape.watch(A[:1, :1])
    loss = losses.policy(log_probs, M[:1, :1], A[0, :1], clip=clip, cap=0.5)
    assert tape.gradients(loss, [log_probs])[0] == 1


def test_a_pair_at_the_margin_of_a_hinge_moves_no_more() -> None:
    tape = Tape()
    pairs = tape.watch(np.array([[-1.0], [-2.0]]))
    loss = losses.preference(pairs, M[:2, :1], kind="hinge", beta=1.0)
    assert not tape.gradients(loss, [pairs])[0].any()


def test_vespo_has_the_shapes_of_its_docstring() -> None:
    def of(**options: Any) -> Any:
        return losses.policy(
            0.5 * ROWS, M, A[:, 0] * [1, -1, 2, -2], old=ROWS, kind="vespo", **options
        )

    assert of() == of(vespo=((2, 3), (3, 2)))


def test_sizes_of_results_are_known_before_a_call() -> None:
    for kind, width in (("sequence_mask", 1), ("sequence_truncate", 1), ("token_mask", 5)):
        assert constants._tokens((4, 5), kind=kind) == {"width": width}
    assert constants._pairs((4, 5)) == {"pairs": 2}


def test_a_lone_answer_has_no_advantage() -> None:
    """Of a group of which one answer is rewarded, there are no others to compare it with."""
    rewards = np.array([5.0, np.nan, np.nan, 1.0, 4.0, np.nan])
    expected = [0, 0, 0, -3, 3, 0]
    np.testing.assert_array_equal(losses.advantages(rewards, 3, kind="rloo"), expected)


def test_a_far_reference_has_a_finite_loss() -> None:
    """Exponents have a limit: a divergence of 1000 nats does not overflow float32."""
    log_probs = np.full((2, 3), -1000, np.float32)
    mask, gains = np.ones((2, 3), bool), np.zeros((2, 3), np.float32)
    options = {"reference": np.zeros_like(log_probs), "old": log_probs, "beta": 0.1}
    with np.errstate(all="raise"):
        loss = losses.policy(log_probs, mask, gains, **options)
    assert np.isfinite(loss)
    assert loss > 0.1 * np.exp(79)
