"""Run one check in this process: ``python -m jobs.gpu NAME DEVICE FOLDER``. Its result goes to FOLDER/result.json."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jobs.gpu import checks, direct, engine_checks, llama, node  # noqa: F401 (they register what they have)
from jobs.gpu.registry import CHECKS, Environment, Skip


def main(name: str, device: str, folder: str) -> None:
    result: dict[str, Any]
    try:
        result = {"state": "ok", "text": CHECKS[name].function(Environment(device, Path(folder)))}
    except Skip as reason:
        result = {"state": "skipped", "text": str(reason)}
    except Exception as error:
        traceback.print_exc()
        first = str(error).splitlines()[0] if str(error) else ""
        result = {"state": "failed", "text": f"{type(error).__name__}: {first}"}
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's end may wait for NCCL, or for a kernel
