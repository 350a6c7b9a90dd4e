"""Memory, step time and cost of a run before it starts. Runs in a command of its own (`python -m trainer.plan`); memory in drivers too."""
