"""Reward functions that misbehave; imported by the reward workers of test_reward_pool."""

import os
import signal
import sys
import time


def obey(response, answer, metadata):
    """Does what the response says."""
    match response.split():
        case ["give", value]:
            return float(value)
        case ["hang"]:
            time.sleep(3600)
        case ["hang-hard"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        case ["exit", code]:
            os._exit(int(code))
        case ["sys-exit"]:
            sys.exit(3)
        case ["allocate", mib]:
            return float(len(bytearray(int(mib) << 20)) > 0)
        case ["allocate-for-ever"]:
            held = []
            while True:
                held.append(bytearray(64 << 20))
        case ["abort"]:
            os.abort()
        case ["raise"]:
            raise RuntimeError("the verifier has a bug")
        case ["text"]:
            return "nonsense"
        case ["none"]:
            return None
        case ["pid"]:
            return float(os.getpid())
        case ["answer"]:
            return float(answer)
    raise AssertionError(response)
