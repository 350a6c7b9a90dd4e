"""The rendered scripts on a real Slurm: Ray clusters of two and three nodes, and jobs on them."""

from __future__ import annotations

WHO = "import ray; ray.init(); print('NODES', sorted(node['NodeManagerAddress'] for node in ray.nodes()))"


def test_a_job_runs_on_two_nodes_and_the_script_ends_with_its_code(projects, slurm):
    project = projects("two-nodes")
    good, bad = project.submit("ray-ppo", "python", "-c", WHO), project.submit("ray-ppo", "python", "-c", "raise SystemExit(3)")
    state = slurm.ended(good)
    log = project.log("ray-ppo", good)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert "NODES ['10.77.0.1', '10.77.0.2']" in log
    assert "ssh -N -L 8265:127.0.0.1:8265 -J me@login.example.com me@n1" in log
    state = slurm.ended(bad)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "3:0"), project.log("ray-ppo", bad)
