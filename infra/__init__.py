"""The Pulumi program and the commands around it."""
