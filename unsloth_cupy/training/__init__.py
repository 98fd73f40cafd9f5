"""Parts of a training loop: tape, optimizers, precision, gradient checkpointing."""
