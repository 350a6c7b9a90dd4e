"""Stands in for dstack-runner, the first process of a container: takes the job, runs its commands on a terminal, hands on their output.

As the real one it leaks the terminal into the job as file 3, interrupts a job that is to stop, and kills it after ten seconds.
lab/dstack/agents.py packs it into the one file that hosts download.
"""
