"""The machine that a command runs on: its processes, ports, locks and files. Runs in commands, and in no Pulumi program."""
