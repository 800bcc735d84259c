"""AdamW with BF16 states on the CPU, beside copies of the same bytes and PyTorch's fused AdamW with f32 states.

    pip install -r benches/peers/requirements.txt
    python benches/peers/cpu_adamw.py

One run whose rounds interleave, as in cpu.py, which says how it measures. Prints a table in Markdown, and leaves it with the
raw samples in benches/peers/results.
"""

import json
import time
from math import ceil

import numpy as np
import torch

from cpu import Ours, arguments, circumstances, interleave, keep, last_level_cache, output, paired

TORCH = "torch fused AdamW, f32 states"
# Rate of the one over the rate of the other, in elements, and the goal.
GOALS = [
    ("adamw-20-stochastic", "copy-20", 0.8),
    ("adamw-20-nearest", "copy-20", 0.8),
    ("adamw-14-stochastic", "copy-14", 0.8),
    ("adamw-20-stochastic", TORCH, 1),
    ("adamw-14-stochastic", TORCH, 1),
]


class Torch:
    """Fused AdamW over tensors that take turns, each with an optimizer of its own."""

    def __init__(self, threads, elements, sets):
        torch.set_num_threads(threads)
        rng = np.random.default_rng(1)
        self.steps, self.turn = [], 0
        for _ in range(sets):
            p, g = (torch.from_numpy(rng.standard_normal(elements, np.float32) * 0.02) for _ in range(2))
            parameter = torch.nn.Parameter(p)
            parameter.grad = g
            self.steps.append(torch.optim.AdamW([parameter], fused=True).step)

    def __call__(self):
        self.turn = (self.turn + 1) % len(self.steps)
        start = time.perf_counter_ns()
        self.steps[self.turn]()
        return time.perf_counter_ns() - start


def driver():
    """The bench program, built."""
    said = output("cargo", "bench", "--bench", "optim", "--no-run", "--message-format", "json")
    messages = [json.loads(line) for line in said.splitlines()]
    (path,) = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "optim"]
    return path


def measure(path, threads, args, sets):
    ours = Ours(path, threads, args.elements, sets, "--serve")
    found = interleave(ours.cases() | {TORCH: Torch(threads, args.elements, sets)}, ours, threads, args)
    ours.close()
    return {"bytes": ours.bytes | {TORCH: 28 * args.elements}} | found


def table(threads, found, elements):
    samples = found["nanoseconds"]
    lines = [
        f"Threads: {threads}. Rounds: {len(samples[TORCH])}; others took at most "
        f"{max(found['share of others']):.0%} of the machine.",
        "",
        "| case | median, M elements/s | p10 | p90 | GB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, ns in samples.items():
        median, p10, p90 = (f"{1e3 * elements / q:.0f}" for q in np.quantile(ns, [0.5, 0.9, 0.1]))
        lines.append(f"| {name} | {median} | {p10} | {p90} | {found['bytes'][name] / np.median(ns):.1f} |")
    lines += ["", "| rate of | over rate of | median | p10 | p90 | goal |", "|---|---|---:|---:|---:|---:|"]
    for name, other, goal in GOALS:
        median, p10, p90 = (f"{q:.3g}" for q in paired(samples, name, other))
        lines.append(f"| {name} | {other} | {median} | {p10} | {p90} | {goal} |")
    return lines


def main():
    args = arguments(__doc__, [2])
    path = driver()
    # The least that a case touches are the 14 bytes of an all-BF16 step, 10 of them memory of its own.
    sets = max(2, ceil(4 * last_level_cache() / (10 * args.elements)))
    record = circumstances("cpu_adamw.py", args, sets)
    lines = []
    for threads in args.threads:
        found = measure(path, threads, args, sets)
        record["threads"][threads] = found
        lines += [*table(threads, found, args.elements), ""]
    keep(record, "cpu-adamw", lines)


if __name__ == "__main__":
    main()
