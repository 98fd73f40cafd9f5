"""Weights in fewer bits than the numbers they stand for, frozen, and products with them."""
