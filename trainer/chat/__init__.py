"""Conversations: messages become token ids by a tokenizer's chat template, and what a policy wrote becomes a message. Runs in every process
that has a tokenizer: drivers, ranks, rollout engines, environments."""
