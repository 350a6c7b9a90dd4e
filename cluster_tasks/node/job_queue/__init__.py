"""The cluster's queue: which jobs run, at which size, and which one makes room. Runs on the head, as a service of the agent.

jobs       what a person submits, and what the queue knows of it; mistakes in it as lines
planner    a pure function: capacity, jobs, owners -> decisions, each with its reason
shares     what each owner is owed
forecast   the planner played forward: when each job would start and end, and what it costs
store      all of it in a SQLite file beside the checkpoints, which the next head opens
rayjobs    what the queue asks of Ray's job API
keeper     one round: look at Ray, note what ended, decide, act
service    the rounds, and the answers to clients on a socket
"""
