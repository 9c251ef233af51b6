"""Run a command so that none of its processes outlives it, or us. A script of its own: standard library only.

    python -S -E supervise.py COMMAND...

Standard input is a pipe that the one who asked holds open: when it closes, because it was closed or because its owner
died in whatever way, everything below is killed. SIGTERM is passed on to the command. Ends with the command's own exit
code (128 + N where signal N ended it), after the last of its descendants is gone.

Three nets: the command has a session of its own, so that its group can be killed; this process is the subreaper, so
that descendants which left the group come back to it; and should this process itself be killed, the kernel kills the
command (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_EVERY = 0.2
"""Seconds between two looks at the command."""


def main(command: list[str]) -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # one thread here: safe
    )
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    while child.poll() is None:
        owner_gone, _, _ = select.select([sys.stdin.fileno()], [], [], LOOK_EVERY)
        if owner_gone:
            break
    code = child.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    kill_descendants()
    code = child.returncode if code is None else code
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill our children, and what becomes our child by that, until there are none."""
    while True:
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
