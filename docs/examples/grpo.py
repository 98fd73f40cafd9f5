"""Train a small model to sort digits with GRPO: it samples answers; right ones get a reward.

python docs/examples/grpo.py            two digits, a few seconds
python docs/examples/grpo.py 3 400      three digits, 400 steps
"""

import sys
from functools import partial

import numpy as np

from unsloth_cupy import AdamW, losses, models

DIGITS, STEPS = (int(n) for n in sys.argv[1:3]) if len(sys.argv) > 2 else (2, 60)
EQUALS, END = 10, 11
PROMPTS, SAMPLES, RATE = 64, 8, 1e-3
config = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "eos_token_id": END,
}
model = models.create(config, seed=0)
rng = np.random.default_rng(0)


def questions(count):
    """Return prompts such as 3 1 =, and their answers: 1 3 END."""
    digits = rng.integers(0, 10, (count, DIGITS))
    prompts = [[*map(int, row), EQUALS] for row in digits]
    return prompts, [[*sorted(prompt[:-1]), END] for prompt in prompts]


def right(answers, completions, samples):
    """Return the rewards: 1 for each completion that equals the answer, 0 for all others."""
    pairs = zip(np.repeat(np.array(answers), samples, axis=0).tolist(), completions, strict=True)
    return np.array([answer == completion for answer, completion in pairs], np.float32)


def loss(drawn, advantages, model):
    """Return the GRPO loss, which favours samples that are better than others of their prompt."""
    now = model.log_probs(drawn.tokens, drawn.tokens, mask=drawn.real).log_probs
    return losses.policy(now, drawn.mask, advantages, old=drawn.log_probs)


# A short supervised training: the model learns the form of an answer, but rarely its digits.
optimizer = AdamW(model.trainable, lr=RATE)
for _ in range(20):
    prompts, answers = questions(PROMPTS)
    tokens = np.array([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    labels = np.where(np.arange(tokens.shape[1]) > DIGITS, tokens, -100)
    optimizer.step(model.loss_and_gradients(tokens, labels)[1])

optimizer = AdamW(model.trainable, lr=RATE, weight_decay=0.0)
for step in range(STEPS):
    prompts, answers = questions(PROMPTS)
    drawn = model.rollouts(prompts, samples=SAMPLES, max_new_tokens=DIGITS + 1, seed=step)
    rewards = right(answers, drawn.completions(), SAMPLES)
    advantages = losses.advantages(rewards, SAMPLES)
    _, gradients = model.value_and_gradients(partial(loss, drawn, advantages))
    optimizer.step(gradients, lr=RATE * (1 - 0.9 * step / STEPS))
    if step % (STEPS // 6) == 0 or step == STEPS - 1:
        print(f"step {step}: {rewards.mean():.0%} of the sampled answers are right")

prompts, answers = questions(200)
chosen = model.generate(np.array(prompts), max_new_tokens=DIGITS + 1)[:, DIGITS + 1 :]
share = right(answers, chosen.tolist(), 1).mean()
assert share > 0.5
print(f"{share:.0%} of the greedy answers to 200 new questions are right")
