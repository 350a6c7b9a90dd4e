"""Settings files of our trainers from the commands and scripts of others'. Runs in a process of its own, which starts nothing."""
