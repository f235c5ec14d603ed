#!/usr/bin/env bash
# What the images are made of:  install.sh STEP...   as root, in a checkout
#   system        Python; a C++ compiler and Python's headers, with which torch.compile and Triton build kernels; the
#                 libraries of InfiniBand, without which NCCL uses TCP; and Slurm's commands: a job in a container asks
#                 Slurm for the reason of a signal
#   dependencies  those of pyproject.toml, as constraints.txt has them
#   launcher      the code, the smoke command, and a user without rights
# An image that has the launcher already is left as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
# Debian and Ubuntu keep pip out of their own Python (PEP 668)
VENV=/opt/launcher

system() {
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates libgomp1 python3 python3-venv slurm-client \
        g++ libc6-dev python3-dev ibverbs-providers libibverbs1 librdmacm1
    rm -rf /var/lib/apt/lists/*
    # munge makes a key when it is installed: in an image it would be everybody's
    rm -f /etc/munge/munge.key
    python3 -m venv "$VENV"
}

dependencies() {
    local links=()
    # wheels that whoever builds lends, such as a CPU build of torch: `podman build -v DIR:/opt/wheels`
    if [ -d /opt/wheels ]; then links=(--find-links /opt/wheels); fi
    "$VENV/bin/python" - > /tmp/requirements.txt <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], sep="\n")
PYTHON
    "$VENV/bin/pip" install --no-cache-dir "${links[@]}" -c constraints.txt torch numpy -r /tmp/requirements.txt
    rm /tmp/requirements.txt
}

launcher() {
    "$VENV/bin/pip" install --no-cache-dir --no-deps .
    "$VENV/bin/pip" check
    install -m 755 docker/smoke /usr/local/bin/smoke
    useradd --create-home --shell /bin/bash --uid 10001 launcher
    # runs are written here; whoever the container runs as may
    install -d -m 1777 /workspace
}

if [ -x "$VENV/bin/launch" ]; then
    echo "install.sh: launcher is there already"
    exit
fi
for step in "$@"; do
    case $step in
        system | dependencies | launcher) "$step" ;;
        *) echo "install.sh: $step: no such step" >&2; exit 2 ;;
    esac
done
