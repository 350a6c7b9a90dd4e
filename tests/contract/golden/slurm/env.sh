# shellcheck shell=bash
# Made from stacks/Pulumi.slurm.yaml. In the project's folder:  . build/slurm/env.sh
export FLOTILLA_STACK=slurm
export RAY_ADDRESS=http://localhost:8265
flotilla_folder=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE:-$0}")" 2>/dev/null && pwd)
[ -f "$flotilla_folder/ray.token" ] || flotilla_folder=$PWD/build/slurm
[ ! -d /shared/me/flotilla ] || export FLOTILLA_RUNS=/shared/me/flotilla # where its jobs write runs
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$flotilla_folder/ray.token" # `ray job` reads it here
RAY_AUTH_TOKEN=$(cat -- "$RAY_AUTH_TOKEN_PATH") && export RAY_AUTH_TOKEN
export FLOTILLA_TOKEN_SLURM="$RAY_AUTH_TOKEN" # `dstack apply` takes it from the environment
unset flotilla_folder
if [ "${http_proxy-}${https_proxy-}${all_proxy-}${HTTP_PROXY-}${HTTPS_PROXY-}${ALL_PROXY-}" ]; then # not for this machine
  no_proxy=${no_proxy:-${NO_PROXY-}} NO_PROXY=${NO_PROXY:-${no_proxy-}}
  case ",$no_proxy," in ",*," | *,localhost,*) ;; *) no_proxy=${no_proxy:+$no_proxy,}localhost,127.0.0.1 ;; esac
  case ",$NO_PROXY," in ",*," | *,localhost,*) ;; *) NO_PROXY=${NO_PROXY:+$NO_PROXY,}localhost,127.0.0.1 ;; esac
  export no_proxy NO_PROXY
fi
