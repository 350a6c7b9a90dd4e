"""Reinforcement learning as its driver sees it: processes started, episodes produced and scored, ranks called. Runs in the driver."""
