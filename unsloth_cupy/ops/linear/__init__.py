"""Products with weights: linear layers, embeddings, adapters."""
