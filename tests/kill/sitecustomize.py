"""For test_kill.py: a job kills its whole process group, Snakemake included, at the moment that KILL_AT names.

KILL_AT="fsync PATTERN N": before the N-th fsync of a file whose path matches; "replace PATTERN N": before the N-th
rename onto a path that matches. A moment is used once: the file KILLED marks it.
"""

import os
import re
import signal

WHERE = os.environ.get("KILL_AT")

if WHERE:
    kind, pattern, number = WHERE.split()
    left = int(number)

    def reached(path: str) -> None:
        global left
        if not re.search(pattern, path) or os.path.exists(os.environ["KILLED"]):
            return
        left -= 1
        if left == 0:
            with open(os.environ["KILLED"], "w") as file:
                file.write(path)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    fsync, replace = os.fsync, os.replace

    def fsync_or_die(fd):
        reached(os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}"))
        return fsync(fd)

    def replace_or_die(source, target, **options):
        reached(os.fspath(target))
        return replace(source, target, **options)

    if kind == "fsync":
        os.fsync = fsync_or_die
    else:
        os.replace = replace_or_die
