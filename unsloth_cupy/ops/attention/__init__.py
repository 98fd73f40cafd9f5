"""Attention: whole, packed, in pages, and what remembers its keys and values."""
