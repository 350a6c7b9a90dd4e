"""A dstack server in one command."""
