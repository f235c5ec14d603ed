"""`sacct` for a cluster that has no accounting: the few questions that programs ask, answered from slurmctld's memory.

slurmctld forgets a job MinJobAge after its end. What this cannot answer is an error, never a guess.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

# sacct's name of a field: squeue's letter for it
FIELDS = {
    "jobid": "%i", "state": "%T", "nodelist": "%N", "jobname": "%j", "partition": "%P", "user": "%u",
    "submit": "%V", "start": "%S", "end": "%e", "elapsed": "%M", "timelimit": "%l", "allocnodes": "%D",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="sacct", allow_abbrev=False)
    parser.add_argument("-j", "--jobs", action="append", default=[])
    parser.add_argument("-o", "--format", default="JobID,State,NodeList")
    parser.add_argument("-P", "--parsable2", action="store_true")
    parser.add_argument("-n", "--noheader", action="store_true")
    # a job is one line here in any case: neither steps nor former starts are remembered
    parser.add_argument("-X", "--allocations", action="store_true")
    parser.add_argument("-D", "--duplicates", action="store_true")
    arguments = parser.parse_args()
    if not arguments.parsable2:
        parser.error("only with --parsable2 here")
    fields = [field.partition("%")[0] for field in arguments.format.split(",")]
    if unknown := [field for field in fields if field.lower() not in FIELDS]:
        parser.error(f"fields not known here: {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    if not arguments.noheader:
        print("|".join(fields))
    ask = ["squeue", "--states=all", "--noheader", "--format=" + "|".join(FIELDS[field.lower()] for field in fields)]
    jobs = [job for several in arguments.jobs for job in several.split(",")]
    for question in [[*ask, f"--jobs={job}"] for job in jobs] or [ask]:
        done = subprocess.run(question, capture_output=True, text=True, check=False)
        if done.returncode and "Invalid job id" not in done.stderr:  # of an unknown job sacct says nothing
            sys.exit(done.stderr)
        print(done.stdout, end="")


if __name__ == "__main__":
    main()
