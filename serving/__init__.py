"""A run's model for others: behind an OpenAI endpoint, on a hub or in a bucket, and measured by benchmark suites.

    flotilla serve STACK run:demo       a job on the cluster: `python -m serving.serve run:demo --name demo --id ID`
    flotilla push run:demo hub:me/demo  model folder with its card to a hub, S3 or GCS
    flotilla eval --suite ...           lm-eval, lighteval or inspect against a served model

`serve.py` is the job: it holds GPUs of the cluster for vLLM's own server (`engine.py`), and a switch in front (`switch.py`) that moves
requests from one engine to the next without dropping any. `models.py` says what a name such as run:demo@20 stands for. Runs in jobs, and
in the shell in which `flotilla push` or `eval` was typed. Of ours it imports the
trainer, and from cluster_tasks what starts processes.
"""
