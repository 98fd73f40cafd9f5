"""What a training loop needs: a tape, optimizers, precision, checkpoints."""
