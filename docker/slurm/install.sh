#!/usr/bin/env bash
# What the cluster's image has beside the training image: Slurm's daemons, munge, and the commands `cluster` and
# `smoke-slurm`.
set -euo pipefail
cd "$(dirname "$0")"

apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends munge slurm-client slurmctld slurmd
rm -rf /var/lib/apt/lists/*
# made when it was installed, and in an image everybody's: each cluster makes its own when it starts
rm -f /etc/munge/munge.key

install -m 755 cluster smoke-slurm /usr/local/bin/
install -D -m 644 slurm.conf /usr/local/share/launcher/slurm.conf
