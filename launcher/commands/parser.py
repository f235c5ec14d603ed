"""Arguments of the verbs that read: flags, where the others take key=value."""

from __future__ import annotations

import argparse
from typing import NoReturn

from launcher.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose complaints look like all others of `launch`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}.\n  {' '.join(self.format_usage().split())}")
