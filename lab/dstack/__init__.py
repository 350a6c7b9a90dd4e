"""A dstack server, and hosts for it."""
