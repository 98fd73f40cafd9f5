"""Times ops and whole steps beside other libraries: see README.md.

    python -m tests.code.programs.beside_peers --out FOLDER [--only lora full] [--device cpu]
    python -m tests.code.programs.beside_peers --list

Each contestant of a step, and each op, has a process of its own.  `beside.jsonl` gets a line for
each contestant as soon as it is known, `beside.json` and `beside.md` have all of them; a second
call with the same folder continues.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from ...hardware.processes import end, start
from . import report
from .cases import Job, jobs, small

LEAST = 10  # seconds: a process needs as many to import torch


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []


def child(job: Job, on_gpu: bool, file: Path) -> None:
    """Make a comparison in this process."""
    from . import ops, training
    from .machine import Machine

    machine, case = Machine(on_gpu), job.case if on_gpu else small(job.case)

    def say(**line: Any) -> None:
        line = {"case": case.name, "contestant": job.contestant} | line
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    others = [line for line in lines_of(file) if line["case"] == case.name]
    try:
        if case.kind == "op":
            getattr(ops, case.name)(machine).run(say)
        else:
            compare = training.train if case.kind == "training" else training.generate
            compare(case, job.contestant, machine, others, say)
    except Exception as error:  # of any library: noted, and the others go on
        say(note=f"fails: {type(error).__name__}: {error}"[:400])


def rates(out: Path, device: str) -> dict[str, Any]:
    """Return the rates of the machine, measured in a process of their own, once for a folder."""
    file = out / "rates.json"
    if not file.exists():
        process = start([sys.executable, "-m", __package__, "--rates", file, "--device", device])
        process.wait()
        end(process)
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return known


def compare(out: Path, device: str, seconds: float, only: list[str]) -> None:
    """Run the jobs that have no line yet, as long as time is left."""
    out.mkdir(parents=True, exist_ok=True)
    file, until = out / "beside.jsonl", time.monotonic() + seconds
    facts = rates(out, device)
    for job in jobs(only):
        done = {(line["case"], line["contestant"]) for line in lines_of(file)}
        own = (job.case.name, job.contestant)
        if own in done or (not job.contestant and job.case.name in {case for case, _ in done}):
            continue
        left = min(job.case.seconds, until - time.monotonic())
        if left < LEAST:
            print(f"no time left for {job.case.name}, {job.contestant}", flush=True)
            break
        words = ["--child", *own, file, "--device", device]
        process = start([sys.executable, "-m", __package__, *words])
        until_then = time.monotonic() + left
        while process.poll() is None and time.monotonic() < until_then:
            time.sleep(0.1)
        status = process.poll()
        end(process)
        now = lines_of(file)
        if status is None and left < job.case.seconds:
            break  # cut off by the end of the run: not its fault
        if not any(line["case"] == own[0] and own[1] in ("", line["contestant"]) for line in now):
            why = f"no result in {left:.0f} s" if status is None else f"ended with {status}"
            with file.open("a") as results:
                line = {"case": own[0], "contestant": own[1], "note": why}
                results.write(json.dumps(line) + "\n")
    result = {"facts": facts, "lines": lines_of(file)}
    (out / "beside.json").write_text(json.dumps(result, indent=1) + "\n")
    table = report.table(result)
    (out / "beside.md").write_text(table + "\n")
    print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder of results; a second call continues")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=480, help="time limit (480)")
    parser.add_argument("--only", nargs="+", default=[], help="first words of cases")
    parser.add_argument("--list", action="store_true", help="only list the work")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rates", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for job in jobs(args.only):
            print(f"{job.case.seconds:3.0f} s {job.case.name} {job.contestant}")
    elif args.rates:
        from .machine import Machine, ceilings

        args.rates.write_text(json.dumps(ceilings(Machine(args.device == "cuda"))))
    elif args.child:
        name, contestant, file = args.child
        case = next(job.case for job in jobs([name]) if job.case.name == name)
        child(Job(case, contestant), args.device == "cuda", Path(file))
    elif args.out:
        compare(args.out, args.device, args.seconds, args.only)
    else:
        parser.error("--out is missing")


if __name__ == "__main__":
    main()
