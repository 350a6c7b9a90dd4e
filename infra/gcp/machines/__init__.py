"""What `pulumi up` rents on GCP: nodes and the bastion, their capacity, start scripts and mounts. Runs in the Pulumi program."""
