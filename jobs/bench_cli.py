"""CPU time of the command line, as a multiple of that of `import hydra`, its largest unavoidable import.

    python jobs/bench_cli.py [--rounds 5]

User and system time of whole processes, including the children they wait for: the minimum over several rounds, in which
all commands take turns. Exits with status 1 if one takes more than three times as long as the import.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

LIMIT = 3.0
LAUNCH = "import sys; from launcher.cli import main; sys.argv[0] = 'launch'; main()"
COMMANDS = {
    "import hydra": ["-c", "import hydra"],
    "launch --help": ["-c", LAUNCH, "--help"],
    "launch train --help": ["-c", LAUNCH, "train", "--help"],
    "launch plan": ["-c", LAUNCH, "plan"],
}


def cpu_s(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each command; the first warms the caches up")
    rounds = parser.parse_args().rounds
    seconds = {name: [cpu_s(arguments)] for name, arguments in COMMANDS.items()}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            seconds[name].append(cpu_s(arguments))
    unit = min(seconds["import hydra"])
    ratios = {name: min(times) / unit for name, times in seconds.items()}
    for name, ratio in ratios.items():
        print(f"{name:<20} {min(seconds[name]):6.3f} s of CPU  {ratio:5.2f} x")
    return int(max(ratios.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
