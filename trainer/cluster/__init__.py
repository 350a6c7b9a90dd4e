"""Ray: which process sits on which resources, is alive, whose turn it is on shared devices. Runs in the driver; heartbeats in all."""
