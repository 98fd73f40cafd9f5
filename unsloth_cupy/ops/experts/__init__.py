"""Mixtures of experts: routers and their losses, sorted rows, grouped products, whole layers."""
