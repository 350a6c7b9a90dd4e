# Starts a compute node in its network: processes, mounts and host name of its own.  power_on.sh NODE
setsid nsenter --net="/run/netns/$1" unshare --uts --mount --pid --fork --kill-child --mount-proc \
  bash "$HERE/node.sh" "$1" >>"$FOLDER/log/$1.out" 2>&1 </dev/null &
echo $! >"/run/$1.pid"
