"""Clusters for tests and benchmarks, made on this machine: Slurm in namespaces, a dstack server with hosts, local processes."""
