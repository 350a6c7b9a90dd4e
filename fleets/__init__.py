"""Pure functions from a stack to what dstack gets about machines: server configuration, fleets, volumes."""
