# Init of a compute node: /dev, /tmp and /dev/shm of its own, the shared file system put back, slurmd.  node.sh NODE
set -eu
hostname "$1"
mkdir -p "/run/shared-$1" "/run/dev-$1"
mount -t tmpfs -o mode=755 tmpfs "/run/dev-$1"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/ptmx /dev/fd /dev/stdin /dev/stdout /dev/stderr "/run/dev-$1"
mkdir "/run/dev-$1/pts" "/run/dev-$1/shm"
mount --bind /dev/pts "/run/dev-$1/pts"
mount --rbind "/run/dev-$1" /dev
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
mount --bind "$FOLDER" "/run/shared-$1"
mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp
mkdir -p "$FOLDER"
mount --bind "/run/shared-$1" "$FOLDER"
mkdir -p "$FOLDER/spool/$1"
slurmd -D -N "$1" &
wait
