"""What a cloud is asked before `pulumi up`, and its answers. What to ask stands in infra/<cloud>/preflight.py."""
