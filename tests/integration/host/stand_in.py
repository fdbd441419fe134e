"""Stand-ins for the services, without engines: they write what the launcher reads. `stand_in.py ROLE ...`.

The file OUT/orders.json says what goes wrong: {"sampler-0": 7} exits with 7, each time it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from leeway.messages import Report, ReportHeader, SamplerStatus, Verdict, VerdictHeader, decode
from leeway.process import secret
from leeway.statuses import remove_status, write_status
from leeway.streams import REPORTS_GROUP, Consumer, Keys, Tail, append, connect, now

BUDGET_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    for name in ("--run", "--redis", "--config", "--model", "--out", "--id", "--port", "--metrics-port"):
        parser.add_argument(name)
    args = parser.parse_args()
    name = args.id or args.role
    orders = json.loads((Path(args.config).parent / "orders.json").read_text())
    print(f"{name} is running", flush=True)
    if name in orders:
        return int(orders[name])
    client, keys = connect(secret(args.redis)), Keys(args.run)

    def report(event: str, step: int) -> None:
        header = ReportHeader(event=event, epoch=0, step=step, version=0, metrics={"reward/mean": 0.5})
        append(client, keys.reports, Report(header), budget_s=BUDGET_S)

    if args.role == "trainer":
        verdicts = Tail(client, keys.verdicts, budget_s=BUDGET_S)
        report("started", 0)
        for step in range(orders["steps"]):
            time.sleep(orders["step_s"])
            report("step", step)
            deadline = time.monotonic() + BUDGET_S
            while not verdicts.read(count=1, block_s=1.0) and time.monotonic() < deadline:
                continue
        report("finished", orders["steps"])
    elif args.role == "controller":
        reports = Consumer(client, keys.reports, REPORTS_GROUP, name, budget_s=BUDGET_S)
        while True:
            for entry in reports.read(100, 0.1):
                header = decode(Report, entry.fields).header
                if header.event == "finished":
                    return 0
                if header.event == "step":
                    verdict = VerdictHeader(epoch=0, step=header.step, action="continue")
                    append(client, keys.verdicts, Verdict(verdict), budget_s=BUDGET_S)
    else:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        while not stop:
            status = SamplerStatus(sampler=name, heartbeat=now(), ready=True, tokens=os.getpid())
            write_status(client, keys, status, budget_s=BUDGET_S)
            time.sleep(0.05)
        remove_status(client, keys, name, budget_s=BUDGET_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
