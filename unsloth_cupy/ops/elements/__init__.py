"""Ops on single elements, and those that move or sum them."""
