"""A Slurm cluster as the place of a stack."""
