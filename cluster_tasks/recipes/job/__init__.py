"""What a recipe's Ray job runs on the cluster, shipped as its working directory. Needs the standard library, and Ray for torchrun.

`python -m cluster_tasks.recipes.job run.json`, in reading order: __main__, lock, preparation, process, nodes. The others are commands of
steps: download, gsm8k; rewards is imported by TRL; retriever is started by a service.
"""
