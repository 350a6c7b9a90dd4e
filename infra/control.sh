# Readies the control node: its data disk, dstack's server on loopback, the health check, automatic security updates.
# Runs at first boot, on some clouds at each, after lines that set `stack`, `extra`, `pins`, `config` and `secret`, and the cloud's functions:
# `data_disk` prints the path of the disk's device, `server_token` the token kept at `secret`, `let_in` readies SSH for who comes through.
# All that the server knows is on the disk, so that a new node takes over from an old one.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
data=/var/lib/flotilla home=/opt/flotilla port=3000

mount_data() {
  local disk found=0 left=600
  if mountpoint -q "$data"; then return; fi
  disk=$(data_disk)
  until [ -b "$disk" ]; do # it is attached once the machine runs
    left=$((left - 1))
    if [ "$left" = 0 ]; then echo "$disk was not attached" >&2 && return 1; fi
    sleep 1
  done
  blkid -p "$disk" || found=$?
  if [ "$found" = 2 ] && cmp -s -n 1048576 "$disk" /dev/zero; then # blkid knows a damaged file system no better than a new disk
    mkfs.ext4 -q -L flotilla "$disk"
  elif [ "$found" != 0 ]; then
    echo "$disk is not empty, and has no file system that can be read; nothing was written to it" >&2 && return 1
  fi
  mkdir -p "$data"
  grep -qs "^$disk " /etc/fstab || echo "$disk $data ext4 defaults,nodev,nosuid,nofail,x-systemd.device-timeout=600 0 2" >>/etc/fstab
  mount "$data"
}

retry() { # what a network or a package index that is away for a while would end for good, as first boot comes once
  local left=20
  until "$@"; do
    left=$((left - 1))
    if [ "$left" = 0 ]; then return 1; fi
    sleep 15
  done
}

install_server() { # exact versions, those of the project's lock
  local wanted
  wanted=$(sed -n 's/^dstack==//p' <<<"$pins")
  if [ "$("$home/bin/python" -c 'import importlib.metadata as found; print(found.version("dstack"))' 2>/dev/null)" = "$wanted" ]; then return; fi
  echo 'DPkg::Lock::Timeout "600";' >/etc/apt/apt.conf.d/51flotilla # the system's own upgrades may be at work
  retry apt-get update -qq
  retry apt-get install -qq -y curl openssh-client openssh-server python3-venv unattended-upgrades
  python3 -m venv "$home"
  printf '%s\n' "$pins" >"$home/pins.txt"
  retry "$home/bin/pip" install --quiet --constraint "$home/pins.txt" "dstack[server,$extra]==$wanted"
}

configure_server() {
  id flotilla >/dev/null 2>&1 || useradd --system --home-dir "$data" --shell /usr/sbin/nologin flotilla
  install -d -m 700 "$data/server"
  (umask 077 && printf '%s\n' "$config" >"$data/server/config.yml")
  chown -R flotilla: "$data"
  cat >/usr/local/bin/flotilla-server <<SERVER
#!/bin/bash
# Asks for the token at each start. dstack keeps it, as that of each of its users, in its database on the encrypted disk.
set -euo pipefail
$(declare -p secret)
$(declare -f server_token)
DSTACK_SERVER_ADMIN_TOKEN=\$(server_token)
export DSTACK_SERVER_ADMIN_TOKEN
exec $home/bin/dstack server --host 127.0.0.1 --port $port
SERVER
  cat >/usr/local/bin/flotilla-health <<HEALTH
#!/bin/bash
# Restarts a server that has not answered three times in a row.
failed=/run/flotilla-failed
if curl -fsS --max-time 20 -o /dev/null http://127.0.0.1:$port/healthcheck; then
  rm -f \$failed
else
  echo >>\$failed
  if [ "\$(wc -l <\$failed)" -ge 3 ]; then
    rm -f \$failed
    systemctl restart flotilla-server
  fi
fi
HEALTH
  chmod 755 /usr/local/bin/flotilla-server /usr/local/bin/flotilla-health
  cat >/etc/systemd/system/flotilla-server.service <<SERVICE
[Unit]
Description=dstack server of stack $stack
Wants=network-online.target
After=network-online.target
RequiresMountsFor=$data

[Service]
User=flotilla
WorkingDirectory=$data
Environment=HOME=$data
Environment=DSTACK_SERVER_DIR=$data/server
Environment=DSTACK_SERVER_LOG_FORMAT=standard
Environment=DSTACK_SERVER_LOG_LEVEL=WARNING
Environment=DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT=1
ExecStart=/usr/local/bin/flotilla-server
Restart=always
RestartSec=5
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths=$data
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
SERVICE
  cat >/etc/systemd/system/flotilla-health.service <<HEALTH
[Unit]
Description=Whether the dstack server of stack $stack answers

[Service]
Type=oneshot
ExecStart=/usr/local/bin/flotilla-health
HEALTH
  cat >/etc/systemd/system/flotilla-health.timer <<TIMER
[Unit]
Description=Health of the dstack server of stack $stack

[Timer]
OnActiveSec=3min
OnUnitActiveSec=1min

[Install]
WantedBy=timers.target
TIMER
}

jump_user() { # who comes as `jump` gets to the server and to SSH of nodes, and no shell
  id jump >/dev/null 2>&1 || useradd --create-home --shell /usr/sbin/nologin --password '*' jump
  cat >/etc/ssh/sshd_config.d/10-jump.conf <<JUMP
Match User jump
  AllowTcpForwarding local
  PermitOpen 127.0.0.1:$port *:22
  ForceCommand /usr/sbin/nologin
  PermitTTY no
  AllowAgentForwarding no
  X11Forwarding no
JUMP
  systemctl restart ssh
}

update_itself() { # security updates, and the restart that some need, at night
  cat >/etc/apt/apt.conf.d/52flotilla <<UPDATES
APT::Periodic::Update-Package-Lists "1";
APT::Periodic::Unattended-Upgrade "1";
Unattended-Upgrade::Automatic-Reboot "true";
Unattended-Upgrade::Automatic-Reboot-Time "04:30";
UPDATES
}

mount_data
install_server
configure_server
let_in
update_itself
systemctl daemon-reload
systemctl enable flotilla-server flotilla-health.timer
systemctl restart flotilla-server
systemctl start flotilla-health.timer
