"""What an optimizer's step does to arrays, and norms of gradients."""
