"""Slurm on the machines of a cluster: its controller on the first, its daemon on each."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from _cluster.links import ClusterError, host_name, hosts_of
from _cluster.machines import entering, give

__all__ = ["provide", "start", "start_daemon"]

_READY_S = 20.0
_CONFIGURATION = """ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation=/var/spool/slurm-state
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ReturnToService=2
SlurmdTimeout=10
KillWait=20
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={slots} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=patient Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10
"""
# Without these, slurmd does not start where control groups are not those of systemd.
_GROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
_PACKAGES = {
    "/usr/sbin/slurmctld": "slurm-wlm",
    "/usr/sbin/munged": "munge",
    "/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so.2": "libpmix2",
}
# Debian's plugin for PMIx opens libpmix.so, which only the package for developers has.
_DAEMON = """set -e
ln -sf libpmix.so.2 /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so
mkdir -p /run/munge /var/spool/slurm-state /var/spool/slurmd
chown munge:munge /run/munge
rm -f /var/log/munge/munged.log
setpriv --reuid munge --regid munge --clear-groups munged
[ "$(hostname)" != "$0" ] || slurmctld
slurmd
"""


def provide(name: str, slots: int) -> None:
    """Write Slurm's configuration for each host, with so many slots on each."""
    missing = [package for part, package in _PACKAGES.items() if not Path(part).exists()]
    if missing:
        raise ClusterError(f"Slurm is not here: apt-get install {' '.join(missing)}")
    hosts = hosts_of(name)
    text = _CONFIGURATION.format(first=hosts[0], nodes=",".join(hosts), slots=slots)
    for number in range(len(hosts)):
        give(name, number, "etc/slurm/slurm.conf", text)
        give(name, number, "etc/slurm/cgroup.conf", _GROUPS)


def start_daemon(name: str, number: int) -> None:
    """Start Slurm's part on one host."""
    line = entering(name, number, ["bash", "-c", _DAEMON, host_name(name, 0)])
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_READY_S)
    if done.returncode:
        raise ClusterError(f"Slurm does not start on host {number}: {done.stderr.strip()}")


def start(name: str) -> None:
    """Start Slurm on all hosts, and wait until it takes jobs."""
    count = len(hosts_of(name))
    for number in range(count):
        start_daemon(name, number)
    ask = entering(name, 0, ["sinfo", "-h", "-p", "main", "-o", "%D %T"])
    deadline = time.monotonic() + _READY_S
    while True:
        said = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        if said == f"{count} idle":
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"Slurm is not ready after {_READY_S:g} s; it says {said!r}")
        time.sleep(0.1)
