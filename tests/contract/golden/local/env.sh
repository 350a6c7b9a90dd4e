# Made from stacks/Pulumi.local.yaml. In the project's folder:  . build/local/env.sh
export RAY_ADDRESS=http://localhost:8265
