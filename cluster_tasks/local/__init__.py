"""This machine as a cluster: nodes are process trees, and the files are those that dstack gets."""
