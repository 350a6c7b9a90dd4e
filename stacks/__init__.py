"""The stack file: settings, rules and places that everyone shares. Loaded in every command and Pulumi program; pure but for host/."""
