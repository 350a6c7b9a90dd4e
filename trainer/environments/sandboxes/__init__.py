"""A machine of its own for every episode. `machine.py` is what an environment sees, `namespaces.py` the provider that needs nothing but
Linux; host/ runs in processes of its own on the node. All else runs in the processes that play episodes."""
