"""Runs a program that nobody read: generated code gets an empty folder, no network, and an end.

The program sees a file system of its own: the system's libraries and Python read-only, an empty folder in memory
(/work, 32 MB) to write to, no home, no /proc, no environment. It has its own process, network and IPC namespaces, no
capabilities, and limits on processor time, memory, processes and file size. The guard names what enforces this:
bubblewrap, or namespaces (unshare and mount of util-linux). Where the kernel permits neither, only limits are left
(rlimits: the network and the user's files stay in reach), and that is refused unless the user allows it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from quantkit.errors import Fault, ToolError

Guard = Literal["bubblewrap", "namespaces", "rlimits"]
Ending = Literal["finished", "failed", "timeout", "output"]

OUTPUT_BYTES = 1 << 20
PROCESSES = 8
FOLDER_BYTES = 32 << 20
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# Runs inside: lower the limits, then become the program. The token is written only when the program came to its end.
_SHIM = """
import os, resource, sys
cpu, memory, processes, size, folder, token = *map(int, sys.argv[1:5]), *sys.argv[5:7]
del sys.argv[1:]
for name, value in (("CPU", cpu), ("AS", memory), ("NPROC", processes), ("FSIZE", size), ("CORE", 0), ("NOFILE", 64)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
os.chdir(folder)
with open(0, closefd=False) as program:
    code = program.read()
exec(compile(code, "program", "exec"), {"__name__": "__main__"})
sys.stdout.flush()
os.write(1, token.encode())
"""

# Runs as the first process of the new namespaces. Arguments: root, folder bytes, then one word a bound path until --.
_BUILD = """
set -e
root=$1; size=$2; shift 2
mount -t tmpfs -o mode=755,size=1m,nosuid,nodev tmpfs "$root"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then mkdir -p "$root$(dirname "$1")"; ln -s "$(readlink "$1")" "$root$1"
    elif [ -d "$1" ]; then
        mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; mount -o remount,bind,ro,nosuid,nodev "$root$1"
    else
        mkdir -p "$root$(dirname "$1")"; : > "$root$1"; mount --bind "$1" "$root$1"
    fi
    shift
done
shift
mkdir "$root/work"
mount -t tmpfs -o mode=777,size=$size,nr_inodes=4096,nosuid,nodev tmpfs "$root/work"
mount -o remount,bind,ro,nosuid,nodev "$root"
chroot "$root" "$@" || exit $?
"""

_serial = count()


@dataclass(frozen=True)
class Limits:
    cpu_seconds: int = 5
    """Processor time: does not depend on how busy the machine is."""
    wall_seconds: float = 15
    memory_mb: int = 512
    """Address space of each process."""


@dataclass(frozen=True)
class Result:
    ending: Ending
    """finished: the program ran to its last line and exited with 0."""
    output: str
    """The tail of what it wrote, standard error included."""
    seconds: float


@cache
def find_guard(allow_unsandboxed: bool = False) -> Guard:
    """The strongest guard that works here, tried on a real program. Raises ToolError where none isolates."""
    guards: tuple[Guard, ...] = ("bubblewrap", "namespaces")
    for guard in guards:
        if works(guard):
            return guard
    if allow_unsandboxed:
        return "rlimits"
    what = "generated code cannot be isolated here: neither bubblewrap nor user namespaces work"
    do = "install bubblewrap, or set evaluate.allow_unsandboxed: true on a machine that holds nothing of value"
    raise ToolError(Fault(what, "evaluate.suites", do))


def works(guard: Guard) -> bool:
    """Whether a program under this guard runs, and cannot see a file of this user."""
    needed = {"bubblewrap": ("bwrap", "setpriv"), "namespaces": ("unshare", "setpriv", "mount"), "rlimits": ()}[guard]
    if not all(_tool(name) for name in needed):
        return False
    with tempfile.NamedTemporaryFile() as file:
        hidden = guard != "rlimits"
        probe = f"import os, socket\nassert os.path.exists({file.name!r}) is not {hidden}\nopen('x', 'w').write('x')"
        return run(probe, guard, Limits(wall_seconds=10)).ending == "finished"


def _tool(name: str) -> str:
    """Its path; empty where it is not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}") or ""


def run_all(programs: Sequence[str], guard: Guard, limits: Limits, label: str) -> list[Result]:
    """Run the programs, as many at a time as there are processors. Results in the order of the programs."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = pool.map(lambda program: run(program, guard, limits), programs)
        return list(tqdm(jobs, total=len(programs), desc=label, file=sys.stderr))


def run(program: str, guard: Guard, limits: Limits) -> Result:
    """Run one Python program (standard library only) to its end, its limits, or its kill. Never raises for its sake."""
    token = secrets.token_hex(16)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quantkit-sandbox-") as folder, tempfile.TemporaryFile() as source:
        source.write(program.encode("utf-8", "surrogatepass"))
        source.seek(0)
        process = subprocess.Popen(
            _command(guard, Path(folder), limits, token),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": _PATH, "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        try:
            output, forced = _watch(process, start + limits.wall_seconds)
        finally:
            _kill(process)
    text = output.decode("utf-8", "replace")
    if forced:
        return Result(forced, text, time.monotonic() - start)
    finished = process.returncode == 0 and text.endswith(token)
    return Result("finished" if finished else "failed", text.removesuffix(token), time.monotonic() - start)


def _watch(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, Literal["timeout", "output"] | None]:
    """Read until the program ends, writes too much or takes too long; the tail, and why it must be killed."""
    assert process.stdout is not None  # noqa: S101 - it was opened as a pipe, the type cannot say so
    tail, total = b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
                return tail, None
            total += len(chunk)
            tail = (tail + chunk)[-4096:]
            if total > OUTPUT_BYTES:
                return tail, "output"
    return tail, "timeout"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole session; the namespace's first process goes with it, and with that all the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def _command(guard: Guard, folder: Path, limits: Limits, token: str) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    inside = str(folder) if guard == "rlimits" else "/work"
    numbers = (limits.cpu_seconds, limits.memory_mb << 20, PROCESSES, FOLDER_BYTES)
    shim = [python, "-I", "-S", "-B", "-X", "utf8", "-c", _SHIM, *map(str, numbers), inside, token]
    if guard == "rlimits":
        return shim
    root = os.geteuid() == 0
    drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    if root:
        # A user id of its own: root is exempt from the limit on processes, and owns files.
        own = str(1_000_000_000 + (os.getpid() * 4096 + next(_serial)) % 1_000_000_000)
        drop += [f"--reuid={own}", f"--regid={own}", "--clear-groups"]
    bound = _bound()
    if guard == "bubblewrap":
        identity = ["--cap-add", "ALL"] if root else ["--unshare-user"]
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent", *identity]
        files: list[str] = []
        for path in bound:
            link = Path(path).is_symlink()
            files += ["--symlink", str(Path(path).readlink()), path] if link else ["--ro-bind", path, path]
        files += ["--dev-bind", "/dev/null", "/dev/null", "--perms", "0777", "--size", str(FOLDER_BYTES)]
        return [
            _tool("bwrap"),
            *spaces,
            *files,
            "--tmpfs",
            "/work",
            "--remount-ro",
            "/",
            "--",
            *(drop if root else []),
            *shim,
        ]
    spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    spaces += [] if root else ["--user", "--map-root-user"]
    build = ["sh", "-c", _BUILD, "sh", str(folder), str(FOLDER_BYTES), *bound, "/dev/null", "--"]
    return [_tool("unshare"), *spaces, *build, *drop, *shim]


@cache
def _bound() -> tuple[str, ...]:
    """What Python needs to start: the system's libraries and its own prefix, where that stands elsewhere."""
    found = [path for path in _SYSTEM if Path(path).exists()]
    found += [path for path in ("/etc/ld.so.cache",) if Path(path).exists()]
    prefix = os.path.realpath(sys.base_prefix)
    return tuple(found if prefix.startswith("/usr") else [*found, prefix])
