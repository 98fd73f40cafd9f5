"""Generation of tokens: decoding steps, sampling, streams and rollouts."""
