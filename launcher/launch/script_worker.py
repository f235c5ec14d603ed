"""Worker of `launch run`: runs the user's script under the agent, as `python SCRIPT ARGS...` would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from launcher.process import exit_without_teardown, prepare_worker, unblock_stop_signals


def main() -> None:
    prepare_worker()
    unblock_stop_signals()
    del sys.argv[0]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as `python SCRIPT` does

    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(runpy.run_path)(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        exit_without_teardown(end.code or 0)
    exit_without_teardown(0)


if __name__ == "__main__":
    main()
