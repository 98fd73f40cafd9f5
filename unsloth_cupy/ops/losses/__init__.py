"""Losses of logits, or of an output head's input and weight: cross entropy, divergences."""
