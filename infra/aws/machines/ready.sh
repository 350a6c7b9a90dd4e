# Readies a host for dstack's SSH fleet: Docker, the NVIDIA container toolkit, sudo without password, port forwarding.
# Runs once, at first boot, after the lines that set `user`, `checkpoints`, `mount_checkpoints`, `start_monitoring` and
# `use_local_disks`. Its log: /var/log/cloud-init-output.log
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

# Until the checkpoints are mounted nobody writes where they belong: a job that comes early would fill a disk that goes with the machine.
# Whatever fails here ends this script before Docker is ready, and a job on an image with a Docker of its own fails at the folder.
if [ -n "$checkpoints" ]; then
  mkdir -p "$checkpoints"
  mountpoint -q "$checkpoints" || chattr +i "$checkpoints"
  mount_checkpoints
  mountpoint -q "$checkpoints"
fi

use_local_disks
command -v docker >/dev/null || { apt-get update -qq && apt-get install -qq -y docker.io; }
systemctl enable --now docker
if [ -e /dev/nvidiactl ] && ! docker info --format '{{json .Runtimes}}' | grep -q nvidia; then
  nvidia-ctk runtime configure --runtime=docker
  systemctl restart docker
fi

if ! id "$user" >/dev/null 2>&1; then # the image's own user has the key, another gets it from there
  useradd --create-home --shell /bin/bash "$user"
  install -d -m 700 -o "$user" -g "$user" "/home/$user/.ssh"
  install -m 600 -o "$user" -g "$user" /home/ubuntu/.ssh/authorized_keys "/home/$user/.ssh/authorized_keys"
fi
usermod --append --groups docker "$user"
echo "$user ALL=(ALL) NOPASSWD:ALL" >"/etc/sudoers.d/90-$user"
chmod 440 "/etc/sudoers.d/90-$user"
echo "AllowTcpForwarding yes" >/etc/ssh/sshd_config.d/10-dstack.conf
systemctl restart ssh

# What watches a node does not keep it from its work.
start_monitoring || echo "no monitoring: CloudWatch's agent did not start" >&2
