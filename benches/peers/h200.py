"""Casts and AdamW steps on the GPU, ours beside PyTorch, Triton and torch.compile, in one run whose rounds interleave.

    python3 benches/peers/h200.py --bench PATH --out FILE.json [--quick]

PATH is the program that `cargo bench --features cuda --bench gpu --no-run` leaves. Prints a table in Markdown and how
the goals were met; FILE keeps the raw samples. A peer that fails is left out, and the file says why.
"""

import argparse
import functools
import gc
import importlib
import itertools
import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

import numpy as np

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # one kernel to compile: no pool of processes

ABSENT = {}
try:
    import torch
except (ImportError, OSError) as error:  # the peers are left out one by one
    torch = None
    ABSENT["torch"] = repr(error)
try:
    import triton
    import triton.language as tl
except (ImportError, OSError) as error:
    triton = None
    ABSENT["triton"] = repr(error)

DEVICE = "cuda"
WARM_UP = 20
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2
CHECKED = 1_000_000  # elements at either end that are compared before the timing

# The hash of sr-states and its values.
VECTORS = {0: 0, 1: 0x688990C0, 2: 0xD1132181, 7: 0x948BA1E6, 65535: 0x33CAD8BA, 123456789: 0xA8F1DB88}


# Stochastic rounding to bf16 in torch operations: the reference, the eager peer, and what torch.compile is given.


def hashed(c):
    """Of int32, whose right shift keeps the sign."""
    c = c ^ ((c >> 16) & 0xFFFF)
    c = c * 0x7FEB352D
    c = c ^ ((c >> 15) & 0x1FFFF)
    c = c * (0x846CA68B - (1 << 32))
    return c ^ ((c >> 16) & 0xFFFF)


def rounded(x, counter):
    """The int16 words of the bf16 values that f32 `x` is rounded to."""
    word = x.view(torch.int32)
    up = word + (hashed(counter) & 0xFFFF)
    size = word & 0x7FFFFFFF
    word = torch.where(size < 0x7F800000, up, torch.where(size > 0x7F800000, word | 0x00400000, word))
    return (word >> 16).to(torch.int16)


def cast_in_torch(x, y, seed):
    """`y` is the int16 view of a bf16 tensor."""
    y.copy_(rounded(x, torch.arange(x.numel(), device=x.device, dtype=torch.int32) + seed))


# The same in Triton.

if triton:

    @triton.jit
    def hashed_in_triton(c):
        c = c ^ (c >> 16)
        c = c * 0x7FEB352D
        c = c ^ (c >> 15)
        c = c * 0x846CA68B
        return c ^ (c >> 16)

    @triton.jit
    def rounded_in_triton(x, counter):
        word = x.to(tl.uint32, bitcast=True)
        size = word & 0x7FFFFFFF
        up = word + (hashed_in_triton(counter) & 0xFFFF)
        word = tl.where(size < 0x7F800000, up, tl.where(size > 0x7F800000, word | 0x00400000, word))
        return (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)

    @triton.jit(do_not_specialize=["seed"])
    def cast_in_triton(x_at, y_at, n, seed, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        x = tl.load(x_at + i, mask=inside)
        tl.store(y_at + i, rounded_in_triton(x, (i + seed).to(tl.uint32)), mask=inside)

    @triton.jit(do_not_specialize=["offset"])
    def adamw_in_triton(
        p_at, g_at, m_at, v_at, n, offset, kept, step, root, beta1, rest1, beta2, rest2, eps, BLOCK: tl.constexpr
    ):
        """`kept` = 1 - lr * decay, `step` = lr / (1 - beta1^t), `root` = 1 / sqrt(1 - beta2^t)."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        p = tl.load(p_at + i, mask=inside)
        g = tl.load(g_at + i, mask=inside)
        m = beta1 * tl.load(m_at + i, mask=inside).to(tl.float32) + rest1 * g
        v = beta2 * tl.load(v_at + i, mask=inside).to(tl.float32) + rest2 * g * g
        p = p * kept - step * m / (tl.sqrt(v) * root + eps)
        tl.store(p_at + i, p, mask=inside)
        tl.store(m_at + i, rounded_in_triton(m, (offset + i).to(tl.uint32)), mask=inside)
        tl.store(v_at + i, rounded_in_triton(v, (offset + n + i).to(tl.uint32)), mask=inside)


# The peers. A maker takes elements and buffer sets, checks a result and returns the work on one set.


def bell(n):
    return torch.empty(n, device=DEVICE).normal_(0, 0.02)


def poisoned(n, dtype):
    y = torch.empty(n, device=DEVICE, dtype=dtype)
    y.view(torch.uint8).fill_(0xA5)
    return y


def ends(n):
    """Slices of the first and the last elements."""
    some = min(n, CHECKED)
    return [slice(0, some), slice(n - some, n)]


def expect(what, right):
    if not right:
        raise AssertionError(f"wrong result: {what}")


def share(equal):
    return equal.sum().item() / equal.numel()


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def copy(width):
    def make(n, sets):
        count = int(width * n / 8)
        pairs = [(bell(count), poisoned(count, torch.float32)) for _ in range(sets)]

        def call(i):
            x, y = pairs[i]
            y.copy_(x)

        call(0)
        expect("copy", all(torch.equal(pairs[0][0][part], pairs[0][1][part]) for part in ends(count)))
        return call

    return make


def nearest(name):
    def make(n, sets):
        dtype = getattr(torch, name)
        pairs = [(bell(n), poisoned(n, dtype)) for _ in range(sets)]

        def call(i):
            x, y = pairs[i]
            y.copy_(x)

        call(0)
        x, y = pairs[0]
        for part in ends(n):
            expect(name, torch.equal(bytes_of(y[part].cpu()), bytes_of(x[part].cpu().to(dtype))))
        return call

    return make


def stochastic(work):
    """Of `work(x, y, seed)`, whose bits must be those of the reference."""

    def make(n, sets):
        pairs = [(bell(n), poisoned(n, torch.bfloat16)) for _ in range(sets)]
        inf, nan = float("inf"), float("nan")
        pairs[0][0][:6] = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e-40], device=DEVICE)
        seeds = itertools.count(12345)

        def call(i):
            x, y = pairs[i]
            work(x, y, next(seeds))

        counters = torch.tensor(list(VECTORS), device=DEVICE, dtype=torch.int32)
        expect("hash", [c & 0xFFFFFFFF for c in hashed(counters).tolist()] == list(VECTORS.values()))
        call(0)
        x, y = pairs[0]
        for part in ends(n):
            counter = torch.arange(part.start, part.stop, device=DEVICE, dtype=torch.int32) + 12345
            equal = share(rounded(x[part], counter) == y[part].view(torch.int16))
            expect(f"{equal:.6f} of the elements are equal", equal == 1)
        return call

    return make


def triton_cast(block):
    def work(x, y, seed):
        cast_in_triton[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), seed, BLOCK=block)

    return stochastic(work)


def eager_cast(n, sets):
    return stochastic(lambda x, y, seed: cast_in_torch(x, y.view(torch.int16), seed))(n, sets)


@functools.cache
def compiled():
    return torch.compile(cast_in_torch, dynamic=False)


def compiled_cast(n, sets):
    seed_at = torch.zeros((), device=DEVICE, dtype=torch.int32)  # a tensor, or each seed is compiled anew
    seed_at.fill_(12345)
    return stochastic(lambda x, y, _: compiled()(x, y.view(torch.int16), seed_at))(n, sets)


def torch_adamw(name):
    def make(n, sets):
        dtype = getattr(torch, name)
        steps, first = [], None
        for _ in range(sets):
            p = torch.nn.Parameter(bell(n).to(dtype))
            p.grad = bell(n).to(dtype)
            # `capturable` lets a graph record it; the fused kernel is the same.
            optimizer = torch.optim.AdamW(
                [p], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True, capturable=True
            )
            steps.append(optimizer.step)
            first = p if first is None else first
        before = [first.detach()[part].to(torch.float32, copy=True) for part in ends(n)]
        steps[0]()
        for part, p in zip(ends(n), before, strict=True):
            g = first.grad[part].float()
            p = p * (1 - LR * DECAY) - LR * g / (g.abs() + EPS)
            tolerance = {"rtol": 1e-2, "atol": 2e-4} if name == "bfloat16" else {"rtol": 1e-5, "atol": 1e-7}
            expect("p", torch.allclose(first.detach()[part].float(), p, **tolerance))
        return lambda i: steps[i]()

    return make


def other_adamw(package, name, dtype):
    """An optimizer of another package, with moments of its own kind."""

    def make(n, sets):
        module = importlib.import_module(package)
        steps = []
        for _ in range(sets):
            p = torch.nn.Parameter(bell(n).to(getattr(torch, dtype)))
            p.grad = bell(n).to(p.dtype)
            optimizer = getattr(module, name)([p], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
            before = p.detach()[:CHECKED].clone()
            optimizer.step()
            moved = float((p.detach()[:CHECKED] - before).abs().median())
            expect(f"p moves by {moved}", 0.9 * LR < moved < 1.1 * LR)
            steps.append(optimizer.step)
        return lambda i: steps[i]()

    return make


def triton_adamw(n, sets):
    block = 1024
    memory = []
    for _ in range(sets):
        m = bell(n).to(torch.bfloat16)
        memory.append((bell(n), bell(n), m, m * m))
    grid = (triton.cdiv(n, block),)
    ages = [0] * sets
    offset = 0

    def call(i):
        nonlocal offset
        ages[i] += 1
        t = ages[i]
        root = (1 - BETA2**t) ** -0.5
        adamw_in_triton[grid](
            *memory[i],
            n,
            offset,
            1 - LR * DECAY,
            LR / (1 - BETA1**t),
            root,
            BETA1,
            1 - BETA1,
            BETA2,
            1 - BETA2,
            EPS,
            BLOCK=block,
        )
        offset = (offset + 2 * n) & 0x3FFFFFFF

    before = [[t[part].clone() for t in memory[0]] for part in ends(n)]
    call(0)
    for part, (p, g, m, v) in zip(ends(n), before, strict=True):
        counter = torch.arange(part.start, part.stop, device=DEVICE, dtype=torch.int32)
        m = BETA1 * m.float() + (1 - BETA1) * g
        v = BETA2 * v.float() + (1 - BETA2) * g * g
        p = p * (1 - LR * DECAY) - LR / (1 - BETA1) * m / (v.sqrt() / (1 - BETA2) ** 0.5 + EPS)
        expect("p", torch.allclose(memory[0][0][part], p, rtol=1e-4, atol=1e-7))
        # A fused multiply-add may tip a rounding.
        for name, x, y, start in (("m", m, memory[0][2], 0), ("v", v, memory[0][3], n)):
            equal = share(rounded(x, counter + start) == y[part].view(torch.int16))
            expect(f"{equal:.6f} of {name} is equal", equal > 0.999)
    return call


# What is measured.


@dataclass
class Theirs:
    label: str
    width: float  # bytes an element, read and written
    make: Callable
    against: str = ""  # which of ours
    graph: bool = False


@dataclass
class Group:
    name: str
    log2: int
    copy: str
    ours: list
    theirs: list


def with_graph(peer):
    return [peer, Theirs(f"{peer.label}, graph", peer.width, peer.make, peer.against, True)]


def replayed(names):
    """Of ours, each eager and from a captured graph."""
    return [each for name in names for each in (name, f"{name}-graph")]


def groups(sizes, small, compiled):
    yield Group(
        f"cast bf16 2^{small}",
        small,
        "copy-6",
        ["copy-6-graph", *replayed(["cast-bf16-stochastic"])],
        [
            *with_graph(Theirs("torch nearest", 6, nearest("bfloat16"), "cast-bf16-stochastic")),
            *with_graph(Theirs("Triton SR, block 1024", 6, triton_cast(1024), "cast-bf16-stochastic")),
        ],
    )
    for k in sizes:
        cast = "cast-bf16-stochastic"
        sr = [
            Theirs("Triton SR, block 256", 6, triton_cast(256), cast),
            Theirs("Triton SR, block 1024", 6, triton_cast(1024), cast),
        ]
        if k == compiled:
            sr.append(Theirs("torch.compile SR", 6, compiled_cast, cast))
        if k <= 24:
            sr = [each for peer in sr for each in with_graph(peer)]
            sr.append(Theirs("torch eager SR", 6, eager_cast, cast))
        yield Group(
            f"cast bf16 2^{k}",
            k,
            "copy-6",
            [cast, "cast-bf16-nearest"],
            [
                Theirs("torch copy", 6, copy(6)),
                Theirs("torch nearest", 6, nearest("bfloat16"), cast),
                *sr,
            ],
        )
        yield Group(
            f"cast fp8 2^{k}",
            k,
            "copy-5",
            ["cast-e4m3-stochastic", "cast-e4m3-nearest", "cast-e5m2-stochastic", "cast-e5m2-nearest"],
            [
                Theirs("torch copy", 5, copy(5)),
                Theirs("torch nearest e4m3", 5, nearest("float8_e4m3fn"), "cast-e4m3-stochastic"),
                Theirs("torch nearest e5m2", 5, nearest("float8_e5m2"), "cast-e5m2-stochastic"),
            ],
        )
        yield Group(
            f"cast e2m1 2^{k}",
            k,
            "copy-4.5",
            ["cast-e2m1-stochastic", "cast-e2m1-nearest"],
            [Theirs("torch copy", 4.5, copy(4.5))],
        )
    for k in [small, *sizes]:
        ours = ["adamw-20-stochastic", "adamw-20-nearest"]
        peers = [
            Theirs("Triton SR, BF16 states", 20, triton_adamw),
            Theirs("torch fused, FP32 states", 28, torch_adamw("float32")),
        ]
        if k <= 24:
            ours = [*replayed(ours), "copy-20-graph"]
            peers = [each for peer in peers for each in with_graph(peer)]
        yield Group(
            f"adamw 20 B 2^{k}",
            k,
            "copy-20",
            ours,
            [Theirs("torch copy", 20, copy(20)), *peers],
        )
    for k in sizes:
        yield Group(
            f"adamw 14 B 2^{k}",
            k,
            "copy-14",
            ["adamw-14-stochastic", "adamw-14-nearest"],
            [Theirs("torch copy", 14, copy(14)), Theirs("torch fused, all BF16", 14, torch_adamw("bfloat16"))],
        )
    for k in sizes:
        for width, each in ((16, []), (10, ["adamw-10-all-stochastic"]), (8, ["adamw-8-all-stochastic"])):
            copied = f"copy-{width}.03125"
            yield Group(
                f"adamw {width} B 2^{k}",
                k,
                copied,
                [f"adamw-{width}-stochastic", f"adamw-{width}-nearest", *each],
                [Theirs("torch copy", width + 1 / 32, copy(width + 1 / 32))],
            )
    yield Group(
        "adamw of few bits 2^26",
        26,
        "copy-16.03125",
        ["adamw-16-stochastic"],
        [
            Theirs("torch fused, FP32 states", 28, torch_adamw("float32")),
            Theirs("bitsandbytes AdamW8bit", 16, other_adamw("bitsandbytes.optim", "AdamW8bit", "float32")),
            Theirs("torchao AdamWFp8", 16, other_adamw("torchao.optim", "AdamWFp8", "float32")),
            Theirs("torchao AdamW8bit", 16, other_adamw("torchao.optim", "AdamW8bit", "float32")),
            Theirs("torchao AdamW4bit", 14, other_adamw("torchao.optim", "AdamW4bit", "float32")),
        ],
    )
    for k in sizes:
        yield Group(
            f"adamw 28 B 2^{k}",
            k,
            "copy-28",
            ["adamw-28"],
            [Theirs("torch copy", 28, copy(28)), Theirs("torch fused, FP32 states", 28, torch_adamw("float32"))],
        )


HOST_OURS = ["adamw-20-stochastic@10", "cast-bf16-stochastic@10"]
HOST_THEIRS = [
    Theirs("torch fused AdamW, FP32 states @10", 28, torch_adamw("float32")),
    Theirs("Triton AdamW SR, BF16 states @10", 20, triton_adamw),
    Theirs("Triton cast SR @10", 6, triton_cast(1024)),
]


# Measuring.


class Ours:
    """The bench program, which answers a case with microseconds and bytes; started anew after a failure."""

    def __init__(self, path):
        self.path, self.process = path, None

    def ask(self, line, seconds=180):
        if self.process is None:
            self.process = subprocess.Popen(
                [self.path, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"HALFULP_REQUIRE_GPU": "1"},
            )
        answer = ""
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], seconds)[0]:
                answer = self.process.stdout.readline()
            microseconds, moved = map(float, answer.split())
        except (OSError, ValueError):
            self.process.kill()
            code = self.process.wait()
            said = self.process.stderr.read()[-1000:]
            self.process = None
            raise RuntimeError(f"{line}: answer {answer!r}, exit {code}, {said}") from None
        return microseconds, moved

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def set_count(moved):
    """As many as pass through four times the cache."""
    return min(max(ceil(256e6 / moved), 1), 64)


class Peer:
    def __init__(self, spec, n):
        self.moved = spec.width * n
        self.sets = sets = set_count(self.moved)
        # About a millisecond and whole turns of the sets, but few enough for the slow ones.
        self.calls = calls = sets * max(1, ceil(min(4e9 / self.moved, 320) / sets))
        call = spec.make(n, sets)
        for i in range(max(WARM_UP, sets)):
            call(i % sets)
        torch.cuda.synchronize()

        def lead():
            for i in range(max(2, sets)):
                call(i % sets)

        def turn():
            for i in range(calls):
                call(i % sets)

        self.lead, self.turn = lead, turn
        if spec.graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                turn()
            graph.replay()
            torch.cuda.synchronize()
            self.memory = call  # the graph knows addresses alone
            self.lead = self.turn = graph.replay

    def sample(self):
        """Microseconds a call, behind calls that are not counted, so that the first one's launch isn't either."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.lead()
        start.record()
        self.turn()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


class Dry:
    """Stands in for a peer where there is no GPU."""

    def __init__(self, spec, n):
        self.moved, self.sets, self.calls = spec.width * n, 1, 1

    def sample(self):
        return self.moved / 4e6 * np.random.default_rng().uniform(0.99, 1.01)


def host_time(spec, n):
    """Of one call, a queue's length at a time, as the bench program does it."""
    sets = set_count(spec.width * n)
    call = spec.make(n, sets)
    for i in range(max(WARM_UP, sets)):
        call(i % sets)
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for i in range(100):
            call(i % sets)
        best = min(best, (time.perf_counter() - start) * 1e4)
        torch.cuda.synchronize()
    return best


def release(dry):
    gc.collect()
    if torch and not dry:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Run:
    def __init__(self, args, record):
        self.args, self.record = args, record
        self.ours = Ours(args.bench)
        self.started = time.monotonic()

    def attempt(self, what, work):
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the others go on
            text = f"{type(error).__name__}: {error}"[:2000]
            self.record["errors"].append({"what": what, "error": text})
            print(f"left out: {what}: {text.splitlines()[0]}", file=sys.stderr, flush=True)
            return None

    def group(self, group):
        print(f"{time.monotonic() - self.started:6.1f} s  {group.name}", file=sys.stderr, flush=True)
        found, n = {}, 1 << group.log2
        for case in [group.copy, *group.ours]:
            line = f"{case}@{group.log2}"
            answer = self.attempt(f"{group.name}: {case}", lambda line=line: self.ours.ask(line))
            if answer:
                found[case] = {"bytes": answer[1], "ours": True, "against": "", "samples": []}
                found[case]["work"] = lambda line=line: self.ours.ask(line)[0]
        for spec in group.theirs:
            maker = Dry if self.args.dry_run else Peer
            peer = self.attempt(f"{group.name}: {spec.label}", lambda spec=spec, maker=maker: maker(spec, n))
            if peer:
                entry = {"bytes": peer.moved, "sets": peer.sets, "calls": peer.calls}
                found[spec.label] = entry | {"ours": False, "against": spec.against or group.ours[0], "samples": []}
                found[spec.label]["work"] = peer.sample
        order = np.random.default_rng(group.log2)
        for _ in range(self.record["rounds"]):
            for label in order.permutation(list(found)).tolist():
                if found[label]["work"]:
                    microseconds = self.attempt(f"{group.name}: {label}", found[label]["work"])
                    found[label]["samples"].append(microseconds)
                    if microseconds is None:
                        found[label]["work"] = None
        for entry in found.values():
            entry["work"] = None
        # Only what went through every round is kept.
        self.record["groups"][group.name] = {
            label: {key: value for key, value in entry.items() if key != "work"}
            for label, entry in found.items()
            if None not in entry["samples"]
        }
        peer = maker = found = None
        self.attempt("clear", lambda: self.ours.ask("clear"))
        release(self.args.dry_run)

    def host(self):
        print(f"{time.monotonic() - self.started:6.1f} s  host time", file=sys.stderr, flush=True)
        for case in HOST_OURS:
            answer = self.attempt(f"host {case}", lambda case=case: self.ours.ask(f"host {case}"))
            if answer:
                self.record["host"][case] = answer[0]
        self.attempt("clear", lambda: self.ours.ask("clear"))
        for spec in HOST_THEIRS:
            work = (lambda: 1.0) if self.args.dry_run else (lambda spec=spec: host_time(spec, 1 << 10))
            microseconds = self.attempt(f"host {spec.label}", work)
            if microseconds:
                self.record["host"][spec.label] = microseconds
        release(self.args.dry_run)


# The table and the goals.


def median(entry):
    return float(np.median(entry["samples"]))


def fastest(group, labels):
    """The label of the least time a byte among those there are."""
    there = [label for label in labels if label in group]
    return min(there, key=lambda label: median(group[label]) / group[label]["bytes"], default=None)


def copies(group):
    return [label for label in group if label.startswith("copy-") or label == "torch copy"]


def table(record):
    lines = [
        "| group | contender | B/element | median us | p10 | p90 | GB/s | share of copy | time over ours |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, group in record["groups"].items():
        n = 1 << int(name.rsplit("^", 1)[1])
        best = fastest(group, copies(group))
        for label, entry in group.items():
            middle, p10, p90 = np.quantile(entry["samples"], [0.5, 0.1, 0.9])
            pace = entry["bytes"] / middle
            part = f"{pace / (group[best]['bytes'] / median(group[best])):.3f}" if best else "-"
            other = group.get(entry["against"])
            ratio = f"{middle / median(other):.3f}" if other else "-"
            shown = f"**halfulp** {label}" if entry["ours"] and not label.startswith("copy-") else label
            lines.append(
                f"| {name} | {shown} | {entry['bytes'] / n:g} | {middle:.2f} | {p10:.2f} | {p90:.2f} "
                f"| {pace / 1e3:.0f} | {part} | {ratio} |"
            )
    lines += ["", "| host time of one call | us |", "|---|---:|"]
    lines += [f"| {label} | {microseconds:.2f} |" for label, microseconds in record["host"].items()]
    return lines


def paired(group, label, other):
    """The median over the rounds of the ratio of times; the same bytes on both sides."""
    return float(np.median(np.array(group[label]["samples"]) / np.array(group[other]["samples"])))


def goals(record):
    """Pairs of a line and whether it is met; None where something is missing."""
    found = []

    def time_goal(name, label, others, what, bound):
        group = record["groups"].get(name, {})
        other = fastest(group, others)
        target = f"{name}, {label}: time <= {bound:g} of {what}"
        if other is None or label not in group:
            found.append((target, "-", None))
            return
        each = [f"{paired(group, label, o):.4f} of {o}" for o in others if o in group]
        found.append((target, ", ".join(each), paired(group, label, other) <= bound))

    block256 = ["Triton SR, block 256", "Triton SR, block 256, graph"]
    for k in (24, 28):
        name, cast = f"cast bf16 2^{k}", "cast-bf16-stochastic"
        time_goal(name, cast, ["torch nearest"], "torch's nearest copy_", 1.0)
        time_goal(name, cast, block256, "the post's kernel", 0.62)
    for k in (24, 28):
        for name, width, formats in (("fp8", "5", ("e4m3", "e5m2")), ("e2m1", "4.5", ("e2m1",))):
            for each in formats:
                both = [f"copy-{width}", "torch copy"]
                time_goal(f"cast {name} 2^{k}", f"cast-{each}-stochastic", both, "copy (0.95 of bandwidth)", 1 / 0.95)
    for width, k, bound, over_nearest in ((20, 28, 1.0, 1.003), (20, 24, 1.01, 1.003), (14, 28, 1.01, 1.005)):
        name, step = f"adamw {width} B 2^{k}", f"adamw-{width}-stochastic"
        time_goal(name, step, [f"copy-{width}", "torch copy"], "copy", bound)
        time_goal(name, step, [f"adamw-{width}-nearest"], "nearest", over_nearest)
    for width, bound, over_nearest in ((16, 1.0, 1.01), (10, 1.05, 1.05), (8, 1.10, 1.10)):
        name, step = f"adamw {width} B 2^28", f"adamw-{width}-stochastic"
        time_goal(name, step, [f"copy-{width}.03125", "torch copy"], "copy", bound)
        time_goal(name, step, [f"adamw-{width}-nearest"], "nearest", over_nearest)
    for width, bound in ((10, 1.12), (8, 1.20)):
        both = [f"copy-{width}.03125", "torch copy"]
        time_goal(f"adamw {width} B 2^28", f"adamw-{width}-all-stochastic", both, "copy", bound)
    few = "adamw of few bits 2^26"
    time_goal(few, "adamw-16-stochastic", ["bitsandbytes AdamW8bit"], "bitsandbytes AdamW8bit", 1 / 7)
    torchao = [f"torchao AdamW{kind}" for kind in ("Fp8", "8bit", "4bit")]
    time_goal(few, "adamw-16-stochastic", torchao, "torchao", 1 / 4)
    host = record["host"].get("adamw-20-stochastic@10")
    measured = "-" if host is None else f"{host:.2f} us"
    found.append(("host time of one step call <= 6 us", measured, None if host is None else host <= 6))
    verdicts = {True: "met", False: "missed", None: "not measured"}
    return [f"target: {target} | measured {measured} | {verdicts[met]}" for target, measured, met in found]


def output(*command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bench", required=True, help="our bench program")
    parser.add_argument("--out", required=True, type=Path, help="JSON file for the raw samples")
    parser.add_argument("--quick", action="store_true", help="three rounds, 2^24 elements only")
    parser.add_argument("--commit", default="unknown", help="what the program was built from")
    parser.add_argument("--dry-run", action="store_true", help="peers that only pretend, to try the table")
    args = parser.parse_args()
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benches/peers/h200.py " + " ".join(sys.argv[1:]),
        "commit": args.commit,
        "dry run": args.dry_run,
        "gpu": output("nvidia-smi", query, "--format=csv,noheader"),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__ if torch else None,
            "cuda of torch": torch.version.cuda if torch else None,
            "triton": triton.__version__ if triton else None,
        },
        "absent": ABSENT,
        "warm-up": WARM_UP,
        "rounds": 3 if args.quick else 9,
        "groups": {},
        "host": {},
        "errors": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if torch:
        torch.manual_seed(1)
    run = Run(args, record)

    def save():
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    for group in groups([24] if args.quick else [24, 28], 16, 24):
        run.attempt(group.name, lambda group=group: run.group(group))
        save()
    run.host()
    run.ours.close()
    record["goals"] = goals(record)
    record["seconds"] = round(time.monotonic() - run.started, 1)
    record["table"] = table(record)
    save()
    print(f"{record['gpu']}, torch {record['versions']['torch']}, triton {record['versions']['triton']}, ", end="")
    print(f"{record['date'][:10]}, commit {args.commit[:12]}, {record['rounds']} rounds", end="\n\n")
    print("\n".join(record["table"]), end="\n\n")
    print("\n".join(record["goals"]))
    for error in record["errors"]:
        print(f"left out: {error['what']} | {error['error'].splitlines()[0]}")


if __name__ == "__main__":
    main()
