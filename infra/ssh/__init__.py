"""Your own machines as the place of a stack."""
