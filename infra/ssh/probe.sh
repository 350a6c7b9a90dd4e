# Sent to a host's `sh -s` by infra/ssh/preflight.py: what dstack and a Ray cluster need of it, as name=value lines. It only reads.
# $1: the folder of checkpoints that all hosts have mounted, or empty.
# shellcheck shell=sh
shared=${1-}
say() { printf '%s=%s\n' "$1" "$2"; }
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

say begin 1 # what a login shell prints stands before this
say arch "$(uname -m)"
say cpus "$(nproc)"
say memory_kb "$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)"
for program in bash curl systemctl docker; do
  say "$program" "$(command -v "$program" 2>/dev/null)"
done
words=$(sudo -n true 2>&1) && say sudo yes
say sudo_says "$(printf %s "$words" | tr '\n' ' ')"

# shellcheck disable=SC2016 # the format is not the shell's
if words=$(root timeout 20 docker info --format '{{.ServerVersion}} {{.DockerRootDir}} {{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null); then
  # shellcheck disable=SC2086 # the words of the format
  set -- $words
  say docker_version "$1"
  disk=$2
  shift 2
  say runtimes "$*"
else
  say docker_says "$(root timeout 20 docker info 2>&1 >/dev/null | tail -n 1)"
fi
say disk_kb "$(root df -Pk "${disk:-/var/lib}" 2>/dev/null | awk 'NR == 2 {print $4}')"

if command -v nvidia-smi >/dev/null 2>&1; then
  if words=$(timeout 30 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1); then
    say nvidia "$(printf %s "$words" | tr '\n' ';')"
  else
    say nvidia_says "$(printf %s "$words" | tail -n 1)"
  fi
fi
[ ! -e /dev/kfd ] || say amd "$(cat /sys/class/kfd/kfd/topology/nodes/*/gpu_id 2>/dev/null | grep -cv '^0$')"
for state in /sys/class/infiniband/*/ports/*/state; do # such as mlx5_0/ports/1/state: 4: ACTIVE
  [ ! -e "$state" ] || case $(cat "$state") in *ACTIVE*) active="${active-}$(basename "$(dirname "$(dirname "$(dirname "$state")")")") " ;; esac
done
say hcas "${active-}"
say addresses "$(ip -o addr show scope global 2>/dev/null | awk '{split($4, parts, "/"); printf "%s ", parts[1]}')"
if [ -n "$shared" ]; then
  say shared "$(stat -f -c %T "$shared" 2>/dev/null)"
  say shared_source "$(findmnt -n -o SOURCE -T "$shared" 2>/dev/null)"
  root test -w "$shared" 2>/dev/null && say shared_writable yes
fi
say epoch "$(date +%s)" # last, as what is above takes seconds
say end 1
