# The login node, which is also the controller: network, munge, slurmctld, and the compute nodes.  hub.sh FOLDER NODES HERE
set -eu
export FOLDER=$1 HERE=$3 PATH=/usr/sbin:/sbin:$PATH SLURM_CONF=$1/etc/slurm.conf
hostname ctl
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind "$FOLDER/etc/hosts" /etc/hosts
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.254/24 dev br0
ip link set br0 up
munged -F --force --key-file="$FOLDER/munge/key" --socket="$FOLDER/munge/socket" --pid-file=/run/munged.pid \
  --log-file="$FOLDER/log/munged.log" --seed-file="$FOLDER/munge/seed" &
for _ in $(seq 200); do [ -S "$FOLDER/munge/socket" ] && break; sleep 0.05; done
slurmctld -D -c &
for i in $(seq "$2"); do
  ip netns add "n$i"
  ip link add "v$i" type veth peer name eth0 netns "n$i"
  ip link set "v$i" master br0 up
  ip -n "n$i" link set lo up
  ip -n "n$i" addr add "10.77.0.$i/24" dev eth0
  ip -n "n$i" link set eth0 up
  bash "$HERE/power_on.sh" "n$i"
done
touch "$FOLDER/up"
wait
