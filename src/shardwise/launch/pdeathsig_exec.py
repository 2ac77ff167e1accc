"""Run a command with a parent-death signal (Linux), because a launcher killed with SIGKILL cannot clean up its workers.

Runs as a script in the new process, before the command replaces it (same pid):

    python -I -S pdeathsig_exec.py LAUNCHER_PID COMMAND ARGUMENT...
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Set the parent-death signal, check that the launcher is alive, and exec the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
