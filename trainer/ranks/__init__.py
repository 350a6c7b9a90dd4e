"""What a training rank does. Runs in the ranks: actors of a reinforcement-learning run, processes of torchrun for the offline trainers."""
