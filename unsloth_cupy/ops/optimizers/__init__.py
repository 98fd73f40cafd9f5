"""Updates of arrays in the steps of optimizers, and norms of gradients."""
