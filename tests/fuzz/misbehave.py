"""What a rank does that has a fault; a printed program with one carries this text with it."""

import os
import signal
import subprocess
import time

STOPPED = 8.0  # seconds, longer than the deadline
done = []  # a hook is called by every backward


class Misbehaved(Exception):
    """The error of the rank that raises."""


def misbehave(kind):
    """Raise, exit, be late or be stopped, on the rank that this is called on."""
    if done:
        return
    done.append(kind)
    if kind == "raise":
        raise Misbehaved
    if kind == "exit":
        os._exit(3)
    if kind == "late":
        time.sleep(1)
    if kind == "stop":
        wake = f"sleep {STOPPED}; kill -CONT {os.getpid()}"
        subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
