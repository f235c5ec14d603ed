"""Messages at the end of a run: to a web address, or by e-mail.

They are sent by a process of their own on the first host, after the run's workers have ended, because a worker that
dies cannot send anything. A message that cannot be sent is reported in the run's output, and changes nothing else. This
module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import smtplib
import socket
import ssl
import urllib.request
from collections.abc import Sequence
from email.message import EmailMessage

from launcher.callbacks.run_outcome import Outcome
from launcher.errors import ConfigError
from launcher.plan.callback_plan import is_web_address, scheme_only

VERDICTS = ("done", "stopped", "failed", "killed", "requeued")
DEFAULT = ("done", "failed", "killed")


def _require_verdicts(verdicts: Sequence[str]) -> frozenset[str]:
    if not verdicts or not set(verdicts) <= set(VERDICTS):
        raise ConfigError("verdicts", list(verdicts), f"must be some of {', '.join(VERDICTS)}.")
    return frozenset(verdicts)


def _secret(name: str, value: str | None, variable: str | None, *, needed: bool) -> str | None:
    """Return ``value``, or the content of an environment variable.

    Raises:
        ConfigError: both are given, none although one is needed, or the variable is not set when it is needed.
    """
    if value is not None and variable is not None:
        raise ConfigError(f"{name}_from", variable, f"{name} is set too.", "Leave one out.")
    if value is None and variable is None and needed:
        raise ConfigError(
            name, "null", f"is not set, nor is {name}_from.",
            f"{name}_from names an environment variable that holds it: then it is not stored in the run's files.",
        )  # fmt: skip
    return value if variable is None else os.environ.get(variable)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message: it is an error instead."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class Webhook:
    """HTTP POST of the run's outcome as JSON: its fields, and ``text``, which Slack, Mattermost and others show.

    Args:
        url: address. It is stored in the run's files; use ``url_from`` for one that is secret.
        url_from: environment variable that holds the address where the run was started.
        verdicts: outcomes that are sent, of done, stopped, failed, killed and requeued.
        timeout_s: seconds after which the attempt is given up.
    """

    def __init__(
        self, url: str | None = None, url_from: str | None = None, verdicts: Sequence[str] = DEFAULT,
        timeout_s: float = 10.0,
    ) -> None:  # fmt: skip
        self._verdicts, self._timeout_s, self._url_from = _require_verdicts(verdicts), timeout_s, url_from
        self._url = _secret("url", url, url_from, needed=True)
        if self._url and not is_web_address(self._url):
            shown = "***" if url_from else scheme_only(self._url)
            raise ConfigError("url", shown, "must be an http:// or https:// address without a user and a password.")

    def on_outcome(self, outcome: Outcome) -> None:
        """Send the message.

        Raises:
            OSError: the server cannot be reached, or refuses it.
        """
        if outcome.verdict not in self._verdicts:
            return
        if not self._url:
            raise OSError(f"the environment variable {self._url_from} is not set, or empty")
        body = json.dumps({"text": outcome.text, **dataclasses.asdict(outcome)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        with _OPENER.open(request, timeout=self._timeout_s) as response:
            response.read()


class Email:
    """E-mail about the run's outcome, by SMTP.

    Args:
        to: addresses.
        server: mail server, HOST or HOST:PORT.
        sender: address that the message comes from. Default: launcher@HOST.
        starttls: encrypt the connection before anything is sent.
        user: account on the server. Default: none.
        password_from: environment variable that holds its password.
        verdicts: outcomes that are sent, of done, stopped, failed, killed and requeued.
        timeout_s: seconds after which the attempt is given up.
    """

    def __init__(
        self, to: list[str], server: str, sender: str | None = None, starttls: bool = False, user: str | None = None,
        password_from: str | None = None, verdicts: Sequence[str] = DEFAULT, timeout_s: float = 10.0,
    ) -> None:  # fmt: skip
        for name, addresses in (("to", to), ("sender", ["a@b" if sender is None else sender])):
            if not addresses or not all("@" in address for address in addresses):
                raise ConfigError(name, addresses, "must be e-mail addresses.")
        host, _, port = server.partition(":")
        if not host or not (port or "25").isdigit():
            raise ConfigError("server", server, "must be HOST or HOST:PORT.")
        if (user is None) != (password_from is None):
            raise ConfigError("user", user, "needs password_from, and the other way round.")
        self._to, self._sender, self._host, self._port = to, sender, host, int(port or 25)
        self._starttls, self._user, self._password_from = starttls, user, password_from
        self._verdicts, self._timeout_s = _require_verdicts(verdicts), timeout_s

    def on_outcome(self, outcome: Outcome) -> None:
        """Send the message.

        Raises:
            OSError: the server cannot be reached, or refuses it.
        """
        if outcome.verdict not in self._verdicts:
            return
        message = EmailMessage()
        message["Subject"] = f"Run {outcome.run}: {outcome.verdict}"
        message["From"] = self._sender or f"launcher@{socket.getfqdn()}"
        message["To"] = ", ".join(self._to)
        message.set_content(outcome.text + "\n")
        with smtplib.SMTP(self._host, self._port, timeout=self._timeout_s) as connection:
            if self._starttls:
                connection.starttls(context=ssl.create_default_context())
            if self._user is not None and self._password_from is not None:
                connection.login(self._user, os.environ.get(self._password_from, ""))
            connection.send_message(message)
