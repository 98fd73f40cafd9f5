"""Ops along the tokens of texts, which hybrid models have in place of attention."""
