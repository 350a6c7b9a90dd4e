# Readies a host for dstack's SSH fleet: Docker, the NVIDIA container toolkit, a user with sudo and key, port forwarding.
# Runs at every boot, after the lines that set `user`, `public_key`, `checkpoints`, `mount_checkpoints`, `start_fabric`,
# `start_monitoring` and `use_local_disks`.
# Its log: journalctl -u google-startup-scripts
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
# Ubuntu's own upgrades may be at work; wait for them, but not forever.
echo 'DPkg::Lock::Timeout "600";' >/etc/apt/apt.conf.d/90-flotilla

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
if command -v nvidia-smi >/dev/null && ! command -v nvidia-ctk >/dev/null; then
  # https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html
  source=https://nvidia.github.io/libnvidia-container
  key=/usr/share/keyrings/nvidia-container-toolkit.asc
  curl -fsSL "$source/gpgkey" -o "$key"
  echo "deb [signed-by=$key] $source/stable/deb/amd64 /" >/etc/apt/sources.list.d/nvidia-container-toolkit.list
  apt-get update -qq && apt-get install -qq -y nvidia-container-toolkit
fi
systemctl enable --now docker
if command -v nvidia-ctk >/dev/null && ! docker info --format '{{json .Runtimes}}' | grep -q nvidia; then
  nvidia-ctk runtime configure --runtime=docker
  systemctl restart docker
fi

# People come in by OS Login, dstack by this user's key: OS Login leaves local users alone.
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
usermod --append --groups docker "$user"
install -d -m 700 -o "$user" -g "$user" "/home/$user/.ssh"
touch "/home/$user/.ssh/authorized_keys"
grep -qxF "$public_key" "/home/$user/.ssh/authorized_keys" || echo "$public_key" >>"/home/$user/.ssh/authorized_keys"
chown "$user:$user" "/home/$user/.ssh/authorized_keys"
chmod 600 "/home/$user/.ssh/authorized_keys"
echo "$user ALL=(ALL) NOPASSWD:ALL" >"/etc/sudoers.d/90-$user"
chmod 440 "/etc/sudoers.d/90-$user"
echo "AllowTcpForwarding yes" >/etc/ssh/sshd_config.d/10-dstack.conf
systemctl restart ssh

start_fabric

# What watches a node does not keep it from its work.
start_monitoring || echo "no monitoring: Google's Ops Agent did not start" >&2
