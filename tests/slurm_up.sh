#!/usr/bin/env bash
# tests/slurm_up.sh: starts a SLURM of one node on this machine, for tests/commands/test_launch_slurm.py. Needs root on Debian or
# Ubuntu. Does nothing where a SLURM answers already; `tests/slurm_up.sh down` ends what it started.
set -euo pipefail

state=/run/slurm-of-one
daemons=(slurmd slurmctld munged)

if [[ ${1:-up} == down ]]; then
    for daemon in "${daemons[@]}"; do
        if [[ -s $state/$daemon.pid ]]; then
            kill "$(<"$state/$daemon.pid")" 2>/dev/null || true
            rm -f "$state/$daemon.pid"
        fi
    done
    exit 0
fi
if timeout 10 sinfo --noheader >/dev/null 2>&1; then
    exit 0
fi
if [[ $EUID != 0 ]]; then
    echo "slurm_up.sh: needs root" >&2
    exit 1
fi
if ! command -v slurmctld >/dev/null; then
    command -v apt-get >/dev/null || { echo "slurm_up.sh: no apt-get to install SLURM with" >&2; exit 1; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
fi

mkdir -p "$state/spool" "$state/saved" /etc/slurm /run/munge
chown munge: /run/munge
if [[ ! -s /etc/munge/munge.key ]]; then
    head -c 1024 /dev/urandom >/etc/munge/munge.key
    chown munge: /etc/munge/munge.key
    chmod 400 /etc/munge/munge.key
fi
# cred_expire: what is requeued may start again after that many seconds (120 by default). A task is known by its process
# group, so that neither cgroups nor a systemd are needed.
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=5
ReturnToService=2
JobRequeue=1
KillWait=30
StateSaveLocation=$state/saved
SlurmdSpoolDir=$state/spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
NodeName=localhost CPUs=$(nproc) RealMemory=$(awk '/^MemTotal/ {print int($2 / 1280)}' /proc/meminfo) State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF

if ! pgrep -x munged >/dev/null; then
    runuser -u munge -- munged
    pgrep -x munged | head -n 1 >"$state/munged.pid"
fi
slurmctld
slurmd -N localhost
for _ in {1..60}; do
    if timeout 5 sinfo --noheader --states=idle 2>/dev/null | grep -q localhost; then
        exit 0
    fi
    sleep 0.5
done
echo "slurm_up.sh: SLURM did not come up; see $state/*.log" >&2
exit 1
