"""Which rank holds which part of a model."""
