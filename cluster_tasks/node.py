"""The node agent (skeleton)."""
