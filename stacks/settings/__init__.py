"""The sections of a stack file, a file each; stacks/schema.py joins them. Pure: read in every command and Pulumi program."""
