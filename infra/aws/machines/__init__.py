"""What `pulumi up` rents on AWS: nodes and the bastion, their capacity, start scripts and mounts. Runs in the Pulumi program."""
