"""From a stack to a running Ray cluster: the task that dstack takes, the agent on every node, and this machine as a cluster."""
