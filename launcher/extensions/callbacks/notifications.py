"""Messages at the end of a run: to a web address, or by the package apprise.

They are sent by a process of their own on the first host, after the run's workers have ended, because a worker that
dies cannot send anything. A message that cannot be sent is reported in the run's output, and changes nothing else. This
module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from launcher.errors import ConfigError
from launcher.extensions.callbacks.declared import VERDICTS, is_web_address, scheme_only
from launcher.launch.run_outcome import Outcome

DEFAULT = ("done", "failed", "killed")


def _require_verdicts(verdicts: Sequence[str]) -> frozenset[str]:
    if not verdicts or not set(verdicts) <= set(VERDICTS):
        raise ConfigError("verdicts", list(verdicts), f"must be some of {', '.join(VERDICTS)}.")
    return frozenset(verdicts)


def _address(url: str | None, variable: str | None) -> str | None:
    """Return ``url``, or the content of an environment variable."""
    if url is not None and variable is not None:
        raise ConfigError("url_from", variable, "url is set too.", "Leave one out.")
    if url is None and variable is None:
        raise ConfigError(
            "url", "null", "is not set, nor is url_from.",
            "url_from names an environment variable that holds it: then it is not stored in the run's files.",
        )  # fmt: skip
    return url if variable is None else os.environ.get(variable)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message: it is an error instead."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class Webhook:
    """HTTP POST of the run's outcome as JSON: its fields, and ``text``, which Slack, Mattermost and others show. To an
    address that is not one of the web, such as ``mailtos://USER:PASSWORD@HOST``, apprise sends the text.

    Args:
        url: address. It is stored in the run's files; use ``url_from`` for one that is secret.
        url_from: environment variable that holds the address where the run was started, which may be one of apprise.
        verdicts: outcomes that are sent, of done, stopped, failed, killed and requeued.
        timeout_s: seconds after which a POST is given up.
    """

    def __init__(
        self, url: str | None = None, url_from: str | None = None, verdicts: Sequence[str] = DEFAULT,
        timeout_s: float = 10.0,
    ) -> None:  # fmt: skip
        self._verdicts, self._timeout_s, self._url_from = _require_verdicts(verdicts), timeout_s, url_from
        self._url = _address(url, url_from)
        if url and not is_web_address(url):
            raise ConfigError(
                "url", scheme_only(url), "must be an http:// or https:// address without a user and a password.",
                "Other addresses are read from an environment variable: url_from.",
            )  # fmt: skip

    def on_outcome(self, outcome: Outcome) -> None:
        """Send the message.

        Raises:
            OSError: the server cannot be reached, or refuses it; or there is no address.
        """
        if outcome.verdict not in self._verdicts:
            return
        if not self._url:
            raise OSError(f"the environment variable {self._url_from} is not set, or empty")
        if not is_web_address(self._url):
            service: Any = import_module("apprise").Apprise()
            title = f"Run {outcome.run}: {outcome.verdict}"
            if not service.add(self._url) or not service.notify(title=title, body=outcome.text):
                raise OSError("apprise could not send the message")
            return
        body = json.dumps({"text": outcome.text, **dataclasses.asdict(outcome)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        with _OPENER.open(request, timeout=self._timeout_s) as response:
            response.read()
