# Init of a compute node: /tmp and /dev/shm of its own, the shared file system put back, slurmd.  node.sh NODE
set -eu
hostname "$1"
mkdir -p "/run/shared-$1"
mount --bind "$FOLDER" "/run/shared-$1"
mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
mkdir -p "$FOLDER"
mount --bind "/run/shared-$1" "$FOLDER"
mkdir -p "$FOLDER/spool/$1"
slurmd -D -N "$1" &
wait
