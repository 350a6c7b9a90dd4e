"""Is a cluster fit for a job? Measured on every node, compared, reported in one table."""
