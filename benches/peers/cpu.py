"""Casts of f32 on the CPU, ours beside those of PyTorch, ml_dtypes and half, in one run whose rounds interleave.

    pip install -r benches/peers/requirements.txt
    python benches/peers/cpu.py

Prints a table in Markdown, and leaves it with the raw samples in benches/peers/results. README.md says how it measures.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

# Threads of OpenMP that spin after their work would take the processor from whoever is measured next.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

# Whom each case is set against in the column "ratio": the same cast of ours; for our stochastic casts, our nearest.
SAME = {
    "torch bf16 nearest": "bf16-nearest",
    "torch e4m3 nearest": "e4m3-nearest",
    "torch e5m2 nearest": "e5m2-nearest",
    "torch bf16 stochastic, eager": "bf16-stochastic",
    "ml_dtypes bf16 nearest": "bf16-nearest",
    "ml_dtypes e4m3 nearest": "e4m3-nearest",
    "ml_dtypes e2m1 nearest": "e2m1-nearest",
    "half-bf16-nearest": "bf16-nearest",
}
GOALS = [
    ("bf16-stochastic", "bf16-nearest", 0.9),
    ("bf16-stochastic", "torch bf16 stochastic, eager", 20),
    ("e4m3-stochastic", "torch e4m3 nearest", 1),
    ("e2m1-stochastic", "e4m3-stochastic", 1),
    ("e2m1-nearest", "e4m3-nearest", 1),
    ("bf16-nearest", "half-bf16-nearest", 1),
]
COPIES = ["copy", "numpy copy", "torch copy"]


class Ours:
    """The driver: each case of the crate is a callable that gives nanoseconds."""

    def __init__(self, path, threads, elements, sets, *options):
        command = [path, *options, "--threads", threads, "--elements", elements, "--sets", sets]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(c) for c in command], stdin=pipe, stdout=pipe, text=True)
        named = (case.rsplit(":", 1) for case in self.ask("cases").split())
        self.bytes = {name: int(size) for name, size in named}

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def cases(self):
        return {name: lambda name=name: int(self.ask(f"run {name}")) for name in self.bytes}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Theirs:
    """The peers, over buffer sets of their own that take turns."""

    def __init__(self, threads, elements, sets):
        rng = np.random.default_rng(1)
        self.x = [rng.standard_normal(elements, np.float32) for _ in range(sets)]
        self.out = [np.ones(elements, np.float32) for _ in range(sets)]
        self.turn = 0
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        torch.set_num_threads(threads)
        n = 4 * elements
        self.bytes = {"numpy copy": 2 * n, "torch copy": 2 * n, "torch bf16 stochastic, eager": n + n // 2}
        self.found = {
            "numpy copy": self.into_array(np.float32),
            "torch copy": self.into_tensor(torch.float32),
            "torch bf16 stochastic, eager": self.timed(eager_sr),
        }
        for name, dtype in {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.items():
            self.found[f"torch {name} nearest"] = self.into_tensor(dtype)
            self.bytes[f"torch {name} nearest"] = n + dtype.itemsize * elements
        arrays = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
        for name, dtype in arrays.items():
            self.found[f"ml_dtypes {name} nearest"] = self.into_array(dtype)
            self.bytes[f"ml_dtypes {name} nearest"] = n + np.dtype(dtype).itemsize * elements

    def timed(self, work):
        def run():
            self.turn = (self.turn + 1) % len(self.x)
            x, out = self.x[self.turn], self.out[self.turn]
            start = time.perf_counter_ns()
            work(x, out)
            return time.perf_counter_ns() - start

        return run

    def into_tensor(self, dtype):
        def work(x, out):
            torch.from_numpy(out).view(dtype)[: x.size].copy_(torch.from_numpy(x))

        return self.timed(work)

    def into_array(self, dtype):
        """One slice a thread: numpy has no threads of its own."""

        def work(x, out):
            out = out.view(dtype)[: x.size]
            cuts = [x.size * t // self.threads for t in range(self.threads + 1)]

            def part(t):
                here = slice(cuts[t], cuts[t + 1])
                np.copyto(out[here], x[here], casting="unsafe")

            if self.threads == 1:
                part(0)
            else:
                list(self.pool.map(part, range(self.threads)))

        return self.timed(work)


def eager_sr(x, _):
    """The obvious stochastic rounding to bf16: random bits below the cut, then truncation. Makes its own output."""
    bits = torch.from_numpy(x).view(torch.int32)
    noise = torch.randint(0, 65536, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class Others:
    """Watches what share of the machine everything but this run takes, where /proc says so."""

    def __init__(self, *processes):
        self.own = [Path(f"/proc/{process}/stat") for process in processes]
        self.share()

    def seconds(self):
        try:
            user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
            own = [path.read_text().rpartition(")")[2].split()[11:13] for path in self.own]
        except OSError:
            return 0
        return (user + nice + system + sum(rest) - sum(int(t) for times in own for t in times)) / os.sysconf(
            "SC_CLK_TCK"
        )

    def share(self):
        """Since the last call."""
        then, self.then = getattr(self, "then", (0, 0)), (time.monotonic(), self.seconds())
        return (self.then[1] - then[1]) / (self.then[0] - then[0]) / os.cpu_count()


def measure(driver, threads, args, sets):
    ours = Ours(driver, threads, args.elements, sets)
    theirs = Theirs(threads, args.elements, sets)
    found = interleave(ours.cases() | theirs.found, ours, threads, args)
    ours.close()
    return {"bytes": ours.bytes | theirs.bytes} | found


def interleave(cases, ours, threads, args):
    """Nanoseconds of every case in rounds, each in a new order."""
    others = Others(os.getpid(), ours.process.pid)
    samples = {name: [] for name in cases}
    shares, repeated, done = [], 0, 0
    order = np.random.default_rng(threads)
    patience = time.monotonic() + args.patience
    while done < args.warm_up + args.rounds:
        others.share()
        round_ = {}
        for name in order.permutation(list(cases)):
            cases[name]()  # wakes the threads and spreads them over the processors
            round_[name] = cases[name]()
            time.sleep(args.pause)  # the peers' idle threads stop spinning
        share = others.share()
        if share > args.others and time.monotonic() < patience:
            repeated += 1
            while others.share() > args.others and time.monotonic() < patience:
                time.sleep(2)
            continue
        if done >= args.warm_up:
            shares.append(round(share, 3))
            for name, nanoseconds in round_.items():
                samples[name].append(nanoseconds)
        done += 1
        print(f"\r{threads} threads, round {done}, {repeated} repeated", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"rounds repeated": repeated, "share of others": shares, "nanoseconds": samples}


def quantiles(values):
    return np.quantile(values, [0.5, 0.1, 0.9])


def table(threads, found, elements):
    """The rows of one thread count."""
    samples, moved = found["nanoseconds"], found["bytes"]
    bandwidth = {name: moved[name] / np.median(ns) for name, ns in samples.items()}
    best = max(COPIES, key=bandwidth.get)
    lines = [
        f"Threads: {threads}. Fastest copy: `{best}`, {bandwidth[best]:.1f} GB/s read and written. "
        f"Rounds: {len(samples[best])}; others took at most {max(found['share of others']):.0%} of the machine.",
        "",
        "| case | median, M elements/s | p10 | p90 | ratio | share of copy bandwidth |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, ns in samples.items():
        median, p10, p90 = (f"{1e3 * elements / q:.0f}" for q in np.quantile(ns, [0.5, 0.9, 0.1]))
        other = SAME.get(name, name.replace("-stochastic", "-nearest"))
        ratio = f"{paired(samples, name, other)[0]:.3g}" if other != name else "-"
        lines.append(f"| {name} | {median} | {p10} | {p90} | {ratio} | {bandwidth[name] / bandwidth[best]:.2f} |")
    lines += ["", "| rate of | over rate of | median | p10 | p90 | goal |", "|---|---|---:|---:|---:|---:|"]
    for name, other, goal in GOALS:
        median, p10, p90 = (f"{q:.3g}" for q in paired(samples, name, other))
        lines.append(f"| {name} | {other} | {median} | {p10} | {p90} | {goal} |")
    return lines


def paired(samples, name, other):
    """Quantiles of the ratio of rates within a round."""
    return quantiles(np.array(samples[other]) / np.array(samples[name]))


def last_level_cache():
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) << {"K": 10, "M": 20}[s[-1]] for s in sizes), default=32 << 20)


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def arguments(doc, threads):
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=threads)
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--others", type=float, default=0.03, help="share of the machine that spoils a round")
    parser.add_argument("--patience", type=float, default=300, help="seconds a thread count for unspoilt rounds")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between measurements")
    return parser.parse_args()


def circumstances(script, args, sets):
    """What is kept beside the samples."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benches/peers/{script} " + " ".join(sys.argv[1:]),
        "commit": output("git", "rev-parse", "HEAD"),
        "changed files": output("git", "status", "--porcelain", "--untracked-files=no").splitlines(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "last-level cache": last_level_cache(),
        "load before": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "torch": torch.__version__,
            "rustc": output("rustc", "--version"),
        },
        "elements": args.elements,
        "buffer sets": sets,
        "warm-up rounds": args.warm_up,
        "threads": {},
    }


def keep(record, kind, lines):
    """Leaves the record and its table in the folder of results, and prints the table."""
    record["load after"] = os.getloadavg()
    date = datetime.fromisoformat(record["date"])
    lines = [f"{record['cpu']}, {record['cores']} cores, {date:%Y-%m-%d}, commit {record['commit'][:12]}", "", *lines]
    RESULTS.mkdir(exist_ok=True)
    name = RESULTS / f"{kind}-{date:%Y%m%d-%H%M}"
    name.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    name.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))


def main():
    args = arguments(__doc__, [1, 2])
    output("cargo", "build", "--release", "--example", "cpu_bench")
    target = json.loads(output("cargo", "metadata", "--format-version", "1", "--no-deps"))["target_directory"]
    driver = Path(target) / "release" / "examples" / "cpu_bench"
    sets = max(3, ceil(4 * last_level_cache() / (4 * args.elements)))
    record = circumstances("cpu.py", args, sets)
    lines = []
    for threads in args.threads:
        found = measure(driver, threads, args, sets)
        record["threads"][threads] = found
        lines += [*table(threads, found, args.elements), ""]
    keep(record, "cpu", lines)


if __name__ == "__main__":
    main()
