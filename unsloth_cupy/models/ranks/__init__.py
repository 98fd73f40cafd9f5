"""Division of models among ranks: tensor, expert and pipeline parallelism."""
