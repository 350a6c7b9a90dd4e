"""This machine as the place of a stack."""
