"""The node agent: what every node of a Ray cluster runs, whoever scheduled it. Standard library alone; needs `ray` on PATH.

    python3 node                            hold the cluster until a signal comes or a node is lost
    python3 node --job 'python train.py'    run one Ray job on it and end with the job's exit code
    python3 node --torchrun train.py        no Ray: become this node's torchrun

Which node this is comes from --rank and --addresses, else from dstack (DSTACK_NODE_RANK, DSTACK_NODES_IPS), else from Slurm
(SLURMD_NODENAME, and SLURM_JOB_NODELIST or, in containers, which have no scontrol, FLOTILLA_NODES). Rank 0 is the head: its
dashboard, which is also the job API, listens on loopback, so that only who can log in reaches it. Flags may also stand in
FLOTILLA_NODE_ARGS.

Exit codes, of which 75 to 77 are worth another try:
    0    a signal ended a held cluster; or the job succeeded, on all nodes
    2    a setting is wrong
    75   a node was lost and did not return; on a worker: the head is gone, or this node is cut off from it
    76   the nodes did not come together in time
    77   Ray could not be started here, or ended on the head
    78   this node failed its burn-in
    else the job's own code; 128 + N where signal N ended the job or this agent while its job ran

In the order in which they are best read:
    agent                      the way from a command line to an exit code
    settings, account, checks  flags and what the scheduler says; whom Ray runs as; what is refused before it starts
    fitness, burn_in           load on the GPUs before the node joins; a program of its own, which has torch
    head, worker, torchrun     what a node becomes
    elastic, meeting           what a node of an elastic fleet becomes, and how it finds the head
    watch, job                 what the head looks after: its nodes, its job
    own_folder                 where Ray and the services write
    service, services          commands that run beside Ray, for jobs
    sandbox_pool, -_status     pools of sandboxes as such services, on the program sandboxes/ beside these modules
    monitoring/                Prometheus and Grafana as such services, their files, and what posts alerts to a webhook
    health, preemption         full disks and short memory; a spot machine's notice
    ray, dashboard             Ray on this node; what Ray says of the cluster
    identity, heads            whose cluster this is, for who asks on the dashboard's port, and what else answers there
    network, ports, proxies    addresses and interfaces; what listens where; no proxy between nodes
    lifeline                   a container ends with its client
    waiting, errors            waits with a deadline; exit codes and what is raised on the way to one

The folder is copied to every node by itself, which is why its modules import one another by relative names, and nothing else of
this project. None of them may be named as a module of the standard library: Python looks for those in the folder first, until
__main__.py runs.
"""
