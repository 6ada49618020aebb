#!/usr/bin/env bash
# Boots a machine, in namespaces of its own: the first process of a host. Arguments: the host's name; its folder, with the
# files that it has for itself in files/; a folder that all hosts share; the number of bytes of its /dev/shm; folders in
# /tmp or /run that it sees, too.
#
# The file system is that of this machine, seen through a layer in memory: what the host writes is its own, and gone with
# it. /tmp, /run and /dev/shm are empty at the start, but for those folders, of which it has a layer as well.
set -euo pipefail
name=$1 folder=$2 shared=$3 memory=$4
shift 4

mount --make-rprivate /
hostname "$name"
mount -t tmpfs -o mode=755 layer "$folder/layer"
mkdir "$folder/layer/upper" "$folder/layer/work" "$folder/layer/root"
root=$folder/layer/root
mount -t overlay -o "lowerdir=/,upperdir=$folder/layer/upper,workdir=$folder/layer/work" root "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o "mode=1777,size=$memory" shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o mode=755 run "$root/run"
mount --bind "$shared" "$root$shared"
for seen in "$@"; do
    layer=$folder/layer/seen-${seen//\//-}
    mkdir -p "$layer/upper" "$layer/work" "$root$seen"
    mount -t overlay -o "lowerdir=$seen,upperdir=$layer/upper,workdir=$layer/work" seen "$root$seen"
done
cp -a "$folder/files/." "$root/"

cd "$root"
mkdir -p run/was
pivot_root . run/was
umount -l /run/was
mkdir -p /run/sshd
/usr/sbin/sshd -E /var/log/sshd.log
echo up
# Whoever loses its parent becomes a child of this shell, which takes note of its end.
while :; do
    sleep 1000 &
    wait $!
done
