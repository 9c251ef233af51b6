"""Hostile programs: nothing outside the sandbox is touched, and the run goes on."""

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from quantkit.errors import ToolError
from quantkit.evaluate import sandbox
from quantkit.evaluate.sandbox import Limits, run

GUARDS = [guard for guard in ("bubblewrap", "namespaces") if sandbox.works(guard)]
SHORT = Limits(cpu_seconds=1, wall_seconds=3, memory_mb=256)

pytestmark = pytest.mark.skipif(not GUARDS, reason="this kernel permits no namespaces, and bubblewrap is not installed")


@pytest.fixture(params=GUARDS)
def guard(request):
    return request.param


HOSTILE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(2,)).start()",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "one large file": "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 16))",
    "shared memory": "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "spin": "while True: pass",
    "deaf to signals": "import signal\nfor s in range(1, 32):\n"
    "  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\nwhile True: pass",
    "print without end": "while True: print('x' * 1000)",
    "exit early": "import os\nos._exit(0)",
    "sys.exit early": "import sys\nsys.exit(0)",
    "raise limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getppid() or 1, signal.SIGKILL)\n"
    "os.killpg(0, signal.SIGKILL)",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "write to the system": "open('/usr/x', 'w')",
    "write to the root": "open('/x', 'w')",
    "read a key": "print(open('SECRET').read())",
    "list the home": "import os\nassert len(os.listdir('HOME')) > 1",  # the way to Python may lead through it
    "other processes": "import os\nos.listdir('/proc/self')",
    "mount": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.mount(b'none', b'/usr', b'tmpfs', 0, None) == 0",
    "take root back": "import os\nos.setuid(0)\nopen('/usr/x', 'w')",
    "no python at all": "def (",
    "surrogate": "\udc80",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_alone(name, guard, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("token-of-this-user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        code = HOSTILE[name].replace("PORT", str(server.getsockname()[1])).replace("SECRET", str(secret))
        started = time.monotonic()
        result = run(code.replace("HOME", str(Path.home())), guard, SHORT)
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.ending != "finished"
    assert "token-of-this-user" not in result.output
    assert len(result.output) <= 4096
    assert time.monotonic() - started < SHORT.wall_seconds + 3
    assert run("print('alive')", guard, Limits()).output == "alive\n"


def test_a_sleeper_is_ended_by_the_clock(guard):
    result = run("import time\ntime.sleep(600)", guard, Limits(wall_seconds=1))
    assert result.ending == "timeout"
    assert 1 <= result.seconds < 3


def test_no_process_outlives_the_program(guard, monkeypatch):
    token = f"outlives-{os.getpid()}"
    monkeypatch.setattr(sandbox.secrets, "token_hex", lambda _: token)
    result = run("import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(600)", guard, Limits())
    assert result.ending == "finished"
    assert not [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if token.encode() in _read(entry)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_secrets_of_the_environment_stay_outside(guard, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run("import os\nprint(dict(os.environ))", guard, Limits())
    assert result.ending == "finished"
    assert "hf_secret" not in result.output


def test_it_starts_in_an_empty_folder_of_its_own(guard):
    code = "import os\nassert os.listdir() == []\nopen('x', 'w').write('x')\nassert os.listdir() == ['x']"
    assert [run(code, guard, Limits()).ending for _ in range(2)] == ["finished"] * 2


def test_results_keep_the_order_of_the_programs_and_bad_ones_do_not_stop_the_rest(guard):
    programs = [f"print({number})" if number % 3 else "1 / 0" for number in range(12)]
    results = sandbox.run_all(programs, guard, SHORT, "order")
    assert [result.output.strip() for result in results if result.ending == "finished"] == [
        str(number) for number in range(12) if number % 3
    ]
    assert all("ZeroDivisionError" in result.output for result in results[::3])


def test_temporary_folders_do_not_pile_up(guard):
    before = set(Path(tempfile.gettempdir()).glob("quantkit-sandbox-*"))
    run("open('x', 'w').write('x' * 1000)", guard, Limits())
    assert set(Path(tempfile.gettempdir()).glob("quantkit-sandbox-*")) <= before


def test_nothing_but_limits_is_refused_unless_allowed(monkeypatch):
    monkeypatch.setattr(sandbox, "works", lambda guard: False)
    sandbox.find_guard.cache_clear()
    try:
        with pytest.raises(ToolError, match="allow_unsandboxed"):
            sandbox.find_guard(False)
        assert sandbox.find_guard(True) == "rlimits"
    finally:
        sandbox.find_guard.cache_clear()


def test_limits_alone_still_end_a_program():
    assert run("while True: pass", "rlimits", SHORT).ending == "failed"
    assert run("x = bytearray(1 << 30)", "rlimits", SHORT).ending == "failed"
    assert run("print('x')", "rlimits", SHORT).output == "x\n"


def test_threads_of_the_caller_do_not_matter(guard):
    endings: list[str] = []
    threads = [threading.Thread(target=lambda: endings.append(run("pass", guard, Limits()).ending)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert endings == ["finished"] * 4
