# Readies a host for dstack's SSH fleet: Docker, the NVIDIA container toolkit, sudo without password, port forwarding.
# Runs once, at first boot, after the lines that set `user` and `mount_checkpoints`. Its log: /var/log/cloud-init-output.log
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

command -v docker >/dev/null || { apt-get update -qq && apt-get install -qq -y docker.io; }
if [ -e /dev/nvidiactl ] && ! docker info --format '{{json .Runtimes}}' | grep -q nvidia; then
  nvidia-ctk runtime configure --runtime=docker
fi
systemctl enable --now docker
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
usermod --append --groups docker "$user"
echo "$user ALL=(ALL) NOPASSWD:ALL" >"/etc/sudoers.d/90-$user"
chmod 440 "/etc/sudoers.d/90-$user"
echo "AllowTcpForwarding yes" >/etc/ssh/sshd_config.d/10-dstack.conf
systemctl restart ssh

mount_checkpoints
