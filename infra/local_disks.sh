# use_local_disks: the machine's own NVMe disks as one, for Docker: images, containers and what they keep in /tmp and ~/.cache. Part of a
# cloud node's startup script. A stop takes what is on these disks, so a service makes them ready at every boot, before Docker starts.
# shellcheck shell=bash
use_local_disks() {
  systemctl is-active --quiet flotilla-local-disks && return
  cat >/usr/local/sbin/flotilla-local-disks <<'END'
#!/bin/bash
set -euo pipefail
shopt -s nullglob
folder=/mnt/local
if mountpoint -q /opt/dlami/nvme; then # AWS's Deep Learning image has made one of them already
  folder=/opt/dlami/nvme
elif ! mountpoint -q "$folder"; then
  found=(/dev/disk/by-id/{nvme-Amazon_EC2_NVMe_Instance_Storage_,google-local-nvme-ssd-}*)
  [ "${#found[@]}" -gt 0 ] || exit 0
  mapfile -t disks < <(realpath "${found[@]}" | sort -u) # a disk has several names
  device=$(blkid -L flotilla-local || true) # after a reboot they are as they were
  if [ -z "$device" ]; then
    device=${disks[0]}
    if [ "${#disks[@]}" -gt 1 ]; then
      command -v mdadm >/dev/null || { apt-get update -qq && apt-get install -qq -y mdadm; }
      device=/dev/md/flotilla-local
      mdadm --create "$device" --run --homehost=any --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
    fi
    mkfs.ext4 -q -F -m 0 -L flotilla-local "$device"
  fi
  mkdir -p "$folder"
  mount -o noatime "$device" "$folder"
fi
for service in docker containerd; do
  mkdir -p "$folder/$service" "/var/lib/$service"
  mountpoint -q "/var/lib/$service" || mount --bind "$folder/$service" "/var/lib/$service"
done
END
  chmod 755 /usr/local/sbin/flotilla-local-disks
  cat >/etc/systemd/system/flotilla-local-disks.service <<'END'
[Unit]
Description=Local disks as one, for Docker
After=local-fs.target dlami-nvme.service
Before=docker.service containerd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/flotilla-local-disks

[Install]
WantedBy=multi-user.target
END
  systemctl daemon-reload
  systemctl stop docker.socket docker containerd 2>/dev/null || true
  # A node without them works, on a slower and smaller disk.
  systemctl enable --now flotilla-local-disks || echo "local disks are not used: journalctl -u flotilla-local-disks" >&2
}
