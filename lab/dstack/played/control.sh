# What the lab's control node has in place of a cloud: a loop device as its disk, a folder that it shares with the lab as the cloud's
# services, and dstack as it is on this machine.
data_disk() { echo "$device"; }

server_token() { cat "$secret"; }

let_in() {
  jump_user
  install -m 755 /dev/stdin /etc/ssh/host/passed-on <<KEYS
#!/bin/sh
cat "/mnt/shared/ssm/$instance.\$1.pub"
KEYS
  printf '%s\n' 'AuthorizedKeysCommand /etc/ssh/host/passed-on %u' 'AuthorizedKeysCommandUser root' \
    'Include /etc/ssh/sshd_config.d/*.conf' >>/etc/ssh/host/sshd_config
  pkill -HUP -o sshd
  while read -r line; do
    sed -i "s|^ExecStart=|Environment=$line\n&|" /etc/systemd/system/flotilla-server.service
  done <<<"$environment"
}
