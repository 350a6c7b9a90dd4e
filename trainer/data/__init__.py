"""Rows become prompts, answers and pairs, and these become packed tensors. Runs in drivers and in the ranks of the offline trainers."""
