"""Messages at the end of a run, received by an HTTP and an SMTP server of the test's own."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.extensions.callbacks import Webhook, declared
from launcher.launch.local import report_outcome
from launcher.launch.run_outcome import Outcome
from launcher.plan.callback_plan import (
    class_arguments,
    may_report,
    name_of,
    notify_entries,
    require_environment,
    solve_callbacks,
    without_reports,
)
from launcher.plan.host import without_path
from tests.conftest import Launch
from tests.helpers import ROOT, make_plan, slowness
from tests.infra.runs import OWN

OUTCOME = Outcome(
    run="a", dir="/runs/a", verdict="failed", steps=3, metrics={"train/loss": 0.25}, error="out of luck", host="here"
)


@pytest.fixture
def web() -> Iterator[tuple[str, list[Any]]]:
    """Address of an HTTP server, and the bodies that it receives."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/broken": 500, "/moved": 301}.get(self.path, 200))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


@pytest.fixture
def mail() -> Iterator[tuple[str, list[str]]]:
    """HOST:PORT of an SMTP server, and the lines that it receives."""
    received: list[str] = []

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rwb", buffering=0) as stream:
            stream.write(b"220 test\r\n")
            while line := stream.readline().decode().rstrip("\r\n"):
                received.append(line)
                if line == "data":
                    stream.write(b"354 continue\r\n")
                    while (line := stream.readline().decode().rstrip("\r\n")) != ".":
                        received.append(line)
                stream.write(b"221 bye\r\n" if line == "QUIT" else b"250 ok\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", received
        thread.join(timeout=30)


def test_a_webhook(web: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, received = web
    Webhook(url=f"{address}/x").on_outcome(OUTCOME)
    (body,) = received
    assert body["text"] == "Run a: failed after 3 steps, train/loss 0.25\nout of luck\nhere:/runs/a"
    assert {name: body[name] for name in ("run", "verdict", "steps", "metrics")} == {
        "run": "a", "verdict": "failed", "steps": 3, "metrics": {"train/loss": 0.25},
    }  # fmt: skip
    Webhook(url=address, verdicts=["done"]).on_outcome(OUTCOME)
    assert len(received) == 1
    monkeypatch.setenv("SECRET_ADDRESS", address)
    Webhook(url_from="SECRET_ADDRESS").on_outcome(OUTCOME)
    assert len(received) == 2
    with pytest.raises(OSError, match="500"):
        Webhook(url=f"{address}/broken").on_outcome(OUTCOME)
    with pytest.raises(OSError, match="301"):  # a redirected POST loses its body
        Webhook(url=f"{address}/moved").on_outcome(OUTCOME)
    with pytest.raises(OSError, match="NOT_SET is not set"):
        Webhook(url_from="NOT_SET").on_outcome(OUTCOME)


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_an_email(mail: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    server, received = mail
    env = {"MAIL": f"mailto://{server}?from=run@example.org&to=me@example.org,you@example.org&mode=insecure"}
    monkeypatch.setenv("MAIL", env["MAIL"])
    entries = notify_entries(["env:MAIL"])
    require_environment([("notify", entries[0])], env)
    Webhook(**class_arguments(entries[0])).on_outcome(OUTCOME)
    assert "rcpt TO:<me@example.org>" in received
    assert "Subject: Run a: failed" in received
    assert "out of luck" in "".join(received)
    monkeypatch.setenv("MAIL", "mailto://127.0.0.1:1?from=run@example.org&to=me@example.org&mode=insecure")
    with pytest.raises(OSError, match="apprise could not send"):
        Webhook(**class_arguments(entries[0])).on_outcome(OUTCOME)
    for wrong in ("geheim", "https://me:geheim@x.org"):
        with pytest.raises(ConfigError, match="nor one that apprise knows") as refused:
            require_environment([("notify", entries[0])], {"MAIL": wrong})
        assert "geheim" not in str(refused.value)


def test_an_email_without_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\[0\]\._target_=Email.*\n.*mailtos://"):
        solve_callbacks([{"_target_": "Email", "to": ["me@example.org"]}])
    monkeypatch.setattr(declared, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"notify=env:MAIL: .*\n.*pip install samebatch\[notify\]"):
        require_environment([("notify", *notify_entries(["env:MAIL"]))], {"MAIL": "mailto://u:p@h"})


@pytest.mark.parametrize(
    ("cls", "arguments", "words"),
    [
        (Webhook, {}, "url=null: is not set, nor is url_from"),
        (Webhook, {"url": "ftp://x"}, "url=ftp://...: must be an http:// or https:// address"),
        (Webhook, {"url": "https://me:geheim@x"}, "url=https://...: must be an http"),
        (Webhook, {"url": "http://x", "url_from": "Y"}, "url_from=Y: url is set too"),
        (Webhook, {"url": "http://x", "verdicts": ["won"]}, "verdicts=.*must be some of done, stopped, failed, killed"),
    ],
)
def test_values_that_make_no_sense(cls: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**arguments)


def test_notify_is_made_of_the_callbacks() -> None:
    hook, secret = notify_entries(["bell", "https://x.org/a?b=c", "env:HOOK"])
    assert hook["url"] == "https://x.org/a?b=c"
    assert secret["url_from"] == "HOOK"
    for entry in (hook, secret):
        assert name_of(entry) == "Webhook"
        Webhook(**class_arguments(entry))


@pytest.mark.parametrize(
    "word",
    [
        "", "beep", "ftp://x", "env:", "env:A-B", "a/b@c", "mailto://a@b", "https://", "https://x:port/a",
        "me@example.org", "https://me:geheim@x.org/a", "https://me:ge/heim@x.org", "mailto://me:geheim@h",
    ],
)  # fmt: skip
def test_an_entry_of_notify_that_has_no_known_form(word: str) -> None:
    """It may hold a password, which is not printed."""
    with pytest.raises(ConfigError, match=r"(?s)must be bell, an https:// address.*An e-mail: notify=") as refused:
        notify_entries(["bell", word])
    assert "heim" not in str(refused.value)
    assert "me:" not in without_path("https://x.org/a?me:geheim")


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "notify=env:HOOK: there is no such environment variable here"),
        ({"HOOK": ""}, "notify=env:HOOK: this environment variable is empty"),
        ({"HOOK": "geheim"}, "notify=env:HOOK: its content is n"),
    ],
)
def test_a_variable_must_hold_an_address(env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        require_environment([("notify", *notify_entries(["env:HOOK"]))], env)
    assert "geheim" not in str(refused.value)
    require_environment([("notify", *notify_entries(["env:HOOK"]))], {"HOOK": "https://x.org:8080/a"})


@pytest.mark.slow
def test_a_message_that_hangs_delays_no_other(
    tmp_path: Path, web: tuple[str, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    address, received = web
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}/secret"
        plan = make_plan(f"notify=['{hanging}','{address}']", run_dir=str(tmp_path))
        plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, cwd=str(tmp_path)))
        plan.save()
        # the attempt that hangs is given up only after the deadline
        report_outcome(plan, {"verdict": "done"}, within_s=20 * slowness())
    assert [body["verdict"] for body in received] == ["done"]
    assert "did not report that the run is done" in capfd.readouterr().err


def test_what_is_asked_after_a_run() -> None:
    entries = [{"_target_": f"launcher.extensions.callbacks.{name}"} for name in ("Ema", "Webhook")] + [
        {"_target_": "my.Own"}
    ]
    assert [may_report(entry) for entry in entries] == [False, True, True]
    assert [may_report(entry, "requeued") for entry in entries] == [False, True, False], "there is little time"
    assert without_reports(entries) == (entries[0], entries[2]), "a drill sends no message"


def test_messages_need_no_torch() -> None:
    code = "import sys, launcher.launch.run_outcome as o; from launcher.extensions.callbacks import Webhook as w; "
    code += "print('torch' in sys.modules)"
    out = subprocess.check_output([sys.executable, "-P", "-c", code], text=True, cwd=ROOT)
    assert out == "False\n"


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_at_the_end_of_a_job(launch: Launch, project: Path, web: tuple[str, list[Any]]) -> None:
    address, received = web
    job = [word for word in OWN if not word.startswith("run.name")]
    hook = "{_target_: Webhook, url_from: TEST_HOOK},{_target_: speech.hooked.Reporting}"
    env = {**os.environ, "TEST_HOOK": address}
    launch("train", *job, "run.name=fine", "train.steps=2", f"callbacks=[{hook}]", env=env, status=0)
    assert (received[0]["run"], received[0]["verdict"], received[0]["steps"]) == ("fine", "done", 2)
    assert received[0]["metrics"]["train/loss"] > 0
    assert (project / "runs/fine/outcome.txt").read_text().startswith("Run fine: done after 2 steps")

    env["TEST_HOOK"] = f"{address}/broken"
    notify = "notify=[bell,env:TEST_HOOK]"
    failed = launch("train", *job, "run.name=dead", "task.trouble=killed", f"callbacks=[{hook}]", notify, env=env)
    assert failed.returncode == 1, "as without the message"
    assert "Webhook (callbacks[0]) did not report that the run is failed: HTTPError: HTTP Error 500" in failed.stderr
    assert [body["verdict"] for body in received[1:]] == ["failed"] * 2, "by the callback and by notify"
    assert "SIGKILL" in received[1]["error"]
    assert "SIGKILL" in (project / "runs/dead/outcome.txt").read_text()

    env["TEST_HOOK"] = address
    own = [str(ROOT / "tests" / "system" / "own_loop.py"), "train.steps=3", "wandb.mode=disabled"]
    hook = "callbacks=[{_target_: Webhook, url_from: TEST_HOOK}]"
    launch("run", "run.name=loop", "--", *own, hook, env=env, status=0)
    assert (received[3]["run"], received[3]["verdict"], received[3]["steps"]) == ("loop", "done", 3)
    script = ["run", "run.name=script", "notify=[env:TEST_HOOK]", "cluster.workers_per_node=1", "--"]
    (project / "script.py").write_text("print('hello')\n")
    assert launch(*script, "script.py", env=env).returncode == 0
    assert (received[4]["run"], received[4]["verdict"]) == ("script", "done")
    refused = launch(*script, "script.py")
    assert refused.returncode == 2
    assert "notify=env:TEST_HOOK: there is no such environment variable here" in refused.stderr
