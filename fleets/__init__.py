"""Pure functions from a stack to what dstack is told about machines: server configuration, fleets, volumes."""
