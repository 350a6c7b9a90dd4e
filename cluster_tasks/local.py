"""Runs a rendered dstack task file on this machine (skeleton)."""
