"""A Slurm cluster, and projects on its shared file system."""
