"""Settings that fit a GPU, chosen by planned memory and predicted time."""
