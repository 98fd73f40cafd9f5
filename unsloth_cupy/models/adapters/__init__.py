"""LoRA: adapters, their folders in peft's layout, and the weights that a merge writes."""
