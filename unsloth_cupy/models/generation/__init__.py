"""Tokens from a model: decoding steps, sampling, streams and rollouts."""
