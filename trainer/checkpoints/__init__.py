"""Checkpoints: folders that are complete or not there, written in a thread of the driver from the files that ranks write."""
