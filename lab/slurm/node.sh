# Init of a compute node: /dev, /tmp and /dev/shm of its own, the shared file system put back, slurmd.  node.sh NODE
set -eu
PROJECT=$(cd "$HERE/../.." && pwd)
hostname "$1"
mkdir -p "/run/dev-$1"
mount -t tmpfs -o mode=755 tmpfs "/run/dev-$1"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/ptmx /dev/fd /dev/stdin /dev/stdout /dev/stderr "/run/dev-$1"
mkdir "/run/dev-$1/pts" "/run/dev-$1/shm"
mount --bind /dev/pts "/run/dev-$1/pts"
mount --rbind "/run/dev-$1" /dev
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
for shared in "$FOLDER" "$PROJECT"; do # both may be below /tmp
  mkdir -p "/run/shared-$1$shared"
  mount --bind "$shared" "/run/shared-$1$shared"
done
mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp
for shared in "$FOLDER" "$PROJECT"; do
  mkdir -p "$shared"
  mount --bind "/run/shared-$1$shared" "$shared"
done
mkdir -p "$FOLDER/spool/$1"
slurmd -D -N "$1" &
wait
