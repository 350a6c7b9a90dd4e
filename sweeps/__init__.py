"""Many runs of one settings file: a search space, trials that pause at rungs and go on exactly, a budget, one report.

    python -m sweeps run.yaml 'optim.lr=[1e-6,3e-6]' 'algorithm.clip_high=0.2..0.3' --trials 12 --budget 200 --stop asha

`space.py` reads what is searched, `checks.py` holds it to the trainer's own checks, `decisions.py` says what runs next, `study.py` is
the one file that knows Optuna, `loop.py` is the driver. A trial is a run of the trainer with a folder of its own, and a job of what
`jobs.py` describes: processes of this shell (`here.py`), or jobs of a cluster (`cluster.py`). Runs in a driver without GPUs or torch.
Of ours it imports the trainer, and from cluster_tasks what starts processes and asks a dashboard.
"""
