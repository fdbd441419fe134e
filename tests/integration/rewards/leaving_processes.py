"""A reward that starts processes and leaves them behind; imported by the workers of test_process_trees."""

import os
import subprocess
import time

SLEEP = "54321"


def plain():
    subprocess.Popen(["sleep", SLEEP])


def own_session():
    subprocess.Popen(["sleep", SLEEP], start_new_session=True)


def double_fork():
    """As a daemon does it: the parent ends, so that the child is an orphan in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", SLEEP])
        os._exit(0)
    os.wait()


def deaf_shell():
    subprocess.Popen(["setsid", "sh", "-c", f"trap '' TERM INT HUP; sleep {SLEEP} & sleep {SLEEP}"])


def fork_without_exec():
    if os.fork() == 0:
        os.setsid()
        time.sleep(int(SLEEP))
        os._exit(0)


STARTS = {f.__name__: f for f in (plain, own_session, double_fork, deaf_shell, fork_without_exec)}


def score(response):
    """`start NAME`, and `and hang`, `and exit` or `and return`."""
    _, name, _, then = response.split()
    STARTS[name]()
    time.sleep(0.3)
    if then == "hang":
        time.sleep(3600)
    if then == "exit":
        os._exit(3)
    return 1.0
