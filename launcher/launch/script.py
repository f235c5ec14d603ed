"""Worker of `launch run`: runs the user's script under the agent, as `python SCRIPT ARGS...` would."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from launcher.process import AGENT_PID, die_with_parent, join_output_streams, leave, lower_shield, mark_last_words


def main() -> None:
    if AGENT_PID in os.environ:
        die_with_parent(int(os.environ[AGENT_PID]))
        lower_shield()
    join_output_streams()
    mark_last_words()
    del sys.argv[0]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python SCRIPT` does

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
