"""What no stack of this project may create. `rules` are plain functions; this folder is also a Pulumi policy pack that runs them."""
