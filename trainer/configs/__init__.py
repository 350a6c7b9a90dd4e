"""The settings of each entry point as frozen models. Loaded in every process, without torch."""
