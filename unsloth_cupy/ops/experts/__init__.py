"""Mixtures of experts: routers, their losses, sorting by expert, grouped products, MLP layers."""
