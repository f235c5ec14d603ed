"""What a worker of `launch run` runs: the user's script, as `python SCRIPT ARGS...` would, under the agent's care."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from launcher.process import die_with_parent, join_output_streams, leave, mark_last_words


def main() -> None:
    die_with_parent(os.getppid())
    join_output_streams()
    mark_last_words()
    del sys.argv[0]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)  # as python itself has it; it was this package's caller

    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(runpy.run_path)(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        leave(end.code or 0)
    leave(0)


if __name__ == "__main__":
    main()
