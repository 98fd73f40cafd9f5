"""The head of losses and the losses of texts as functions of tensors, eager and compiled."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")

from unsloth_cupy import linear_divergence, linear_log_probs, losses  # noqa: E402

ROWS, TOKENS, HIDDEN, VOCAB = 4, 6, 16, 50
torch.manual_seed(0)
X, WEIGHT, BIAS = torch.randn(ROWS, TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
LABELS = torch.randint(VOCAB, (ROWS, TOKENS))
MASK = torch.arange(TOKENS) >= torch.tensor([[1], [3], [0], [4]])
OLD = torch.randn(ROWS, TOKENS) / 10 - 4
GAINS = torch.tensor([1.0, -1.0, 0.5, 0.0])
OPTIONS = {"temperature": 0.8, "softcap": 20.0, "scale": 0.5}


def theirs(x, weight, bias):
    """Return log-probabilities and entropy by torch."""
    z = 20.0 * torch.tanh((x @ weight.T + bias) * 0.5 / 20.0) / 0.8
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, LABELS[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def ours(x, weight, bias):
    found = linear_log_probs(x, weight, LABELS, bias, **OPTIONS)
    return found.log_probs, found.entropy


def preference(head, *arrays):
    return losses.preference(head(*arrays)[0], MASK, OLD)


def dpo_of_torch(head, *arrays):
    rewards = ((head(*arrays)[0] - OLD) * MASK).sum(1)
    return -torch.nn.functional.logsigmoid(0.1 * (rewards[:2] - rewards[2:])).mean()


def policy(head, *arrays):
    now, entropy = head(*arrays)
    weights = losses.high_entropy(entropy.detach(), MASK, 0.5).float()
    return losses.policy(now, MASK, GAINS, old=OLD, weights=weights) - 0.01 * entropy.mean()


def policy_of_torch(head, *arrays):
    now, entropy = head(*arrays)
    ratio, gains = (now - OLD).exp(), GAINS[:, None]
    terms = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
    least = torch.quantile(entropy[MASK].detach(), 0.5)
    kept = MASK & (entropy.detach() >= least)
    return (terms * kept).sum() / MASK.sum() - 0.01 * entropy.mean()


def kto(head, *arrays):
    desirable = torch.tensor([True, False, True, True])
    return losses.kto(head(*arrays)[0], MASK, OLD, desirable)


def kto_of_torch(head, *arrays):
    rewards = 0.1 * ((head(*arrays)[0] - OLD) * MASK).sum(1)
    return (1 - torch.sigmoid(rewards * torch.tensor([1, -1, 1, 1]))).mean()


def nll(head, *arrays):
    return losses.nll(head(*arrays)[0], MASK)


def nll_of_torch(head, *arrays):
    return -(head(*arrays)[0] * MASK).sum() / MASK.sum()


def step(function, head):
    """Return a loss and its gradients."""
    arrays = [array.clone().requires_grad_() for array in (X, WEIGHT, BIAS)]
    loss = function(head, *arrays)
    return loss, *torch.autograd.grad(loss, arrays)


PAIRS = [
    (preference, dpo_of_torch),
    (policy, policy_of_torch),
    (kto, kto_of_torch),
    (nll, nll_of_torch),
]


@pytest.mark.parametrize(("function", "of_torch"), PAIRS, ids=lambda each: each.__name__)
def test_losses_of_tensors(function, of_torch):
    """The head and the loss together: value and gradients are those of torch, compiled or not."""
    expected, eager = step(of_torch, theirs), step(function, ours)
    torch.testing.assert_close(eager, expected, rtol=2e-5, atol=1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for actual, before in zip(step(compiled, ours), eager, strict=True):
        assert torch.equal(actual, before)


def test_the_head_of_a_teacher():
    """A divergence whose logits are never whole, in one graph."""
    student = X.clone().requires_grad_()

    def loss(x):
        return linear_divergence(x, WEIGHT, X, WEIGHT, BIAS, None, kind="jsd", beta=0.5).mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    values = [function(student) for function in (loss, compiled)]
    first, second = (torch.autograd.grad(value, student)[0] for value in values)
    assert torch.equal(*values)
    assert torch.equal(first, second)
    assert first.abs().max() > 0
