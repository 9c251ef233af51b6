"""Laws of jobs: JSON in, JSON out, the log's tail in the error, and never an orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.environments import run
from quantkit.errors import ToolError

Jobs = Callable[[str], str]

GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
open({pids!r}, "w").write(f"{{child.pid}}")
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """job(code) puts a script into a jobs folder of our own, which our own interpreter runs; returns its name."""
    monkeypatch.setattr(run, "JOBS", tmp_path)
    monkeypatch.setattr(run, "sync", lambda name: Path(sys.executable))

    def write(code: str) -> str:
        (tmp_path / "scripted.py").write_text(textwrap.dedent(code))
        return "scripted"

    return write


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(path.read_text())


def test_a_job_reads_its_request_and_its_answer_comes_back(job: Jobs, tmp_path: Path) -> None:
    name = job("""
        import json, sys
        request = json.load(open(sys.argv[1]))
        json.dump({"twice": 2 * request["n"]}, open(sys.argv[2], "w"))
    """)
    assert run.run_job("any", name, {"n": 21}, 30, tmp_path / "log") == {"twice": 42}


def test_a_failed_job_shows_its_last_words(job: Jobs, tmp_path: Path) -> None:
    name = job("print('a' * 9); raise SystemExit('the last words')")
    with pytest.raises(ToolError, match="exit code 1") as caught:
        run.run_job("any", name, {}, 30, tmp_path / "log")
    assert "the last words" in str(caught.value)


@pytest.mark.parametrize("answer", ["", "[1]", "{half"])
def test_an_answer_that_is_no_object_is_an_error(job: Jobs, tmp_path: Path, answer: str) -> None:
    name = job(f"import sys; open(sys.argv[2], 'w').write({answer!r})")
    with pytest.raises(ToolError, match="answered"):
        run.run_job("any", name, {}, 30, tmp_path / "log")


def test_a_job_out_of_time_leaves_no_orphan_even_one_in_a_session_of_its_own(job: Jobs, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    name = job(GRANDCHILD.format(pids=str(pids)) + "print('waiting', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(ToolError, match="did not end within 3 s") as caught:
        run.run_job("any", name, {}, 3, tmp_path / "log")
    assert "waiting" in str(caught.value)
    assert gone(wait_for(pids))


def test_what_a_finished_job_leaves_behind_is_killed(job: Jobs, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    name = job(GRANDCHILD.format(pids=str(pids)) + "open(sys.argv[2], 'w').write('{}')\n")
    assert run.run_job("any", name, {}, 30, tmp_path / "log") == {}
    assert gone(wait_for(pids))


@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_a_killed_owner_or_supervisor_leaves_no_orphan(tmp_path: Path, victim: str) -> None:
    pids = tmp_path / "pid"
    body = f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"""
        import sys, time
        from pathlib import Path
        from quantkit.environments.run import Process
        process = Process([sys.executable, "-c", {body!r}], {{}}, Path({str(tmp_path / "log")!r}))
        print(process._supervisor.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        supervisor, child = int(owner.stdout.readline()), wait_for(pids)
        assert alive(child)
        os.kill(owner.pid if victim == "owner" else supervisor, signal.SIGKILL)
        assert gone(child)
        owner.kill()


def test_ending_asks_first_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    for ignore, code in ((False, 143), (True, 137)):
        pids = tmp_path / f"pid-{ignore}"
        body = "import os, signal, sys, time;"
        body += "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignore else ""
        body += f"open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        process = run.Process([sys.executable, "-c", body], dict(os.environ), tmp_path / "log")
        child = wait_for(pids)
        process.terminate(grace=1)
        assert process.poll() == code
        assert gone(child)


def test_a_tool_sees_no_secret_and_stays_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("HARMLESS", "seen")
    seen = run.child_environment(Path("/env/bin/python"))
    assert "hush" not in seen.values()
    assert seen["HARMLESS"] == "seen"
    assert (seen["HF_HUB_OFFLINE"], seen["DO_NOT_TRACK"], seen["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")
    assert seen["PATH"].startswith("/env/bin:")
