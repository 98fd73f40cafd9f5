"""Ops along the tokens of texts: what hybrid models have in place of attention."""
