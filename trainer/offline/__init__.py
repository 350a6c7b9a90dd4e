"""Learning from data alone: answers and preferences. Runs in the ranks, which are processes of torchrun, or one process by itself."""
