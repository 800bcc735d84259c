"""Casts and optimizer steps on the GPU, ours beside PyTorch, Triton, torch.compile, bitsandbytes and torchao.

    python3 benches/peers/h200.py --bench PATH --out FILE.json [--quick] [--only PART ...] [--seconds N]

One run, whose rounds interleave. PATH is the program that `cargo bench --features cuda --bench gpu --no-run` leaves.
Prints a table in Markdown and how the goals were met; FILE keeps the raw samples. A peer that fails is left out, and
the file says why.
"""

import argparse
import functools
import gc
import importlib
import importlib.metadata
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
WARM_UP, SLOW_WARM_UP = 20, 3
SLOW = 0.02  # seconds a call from which the second number counts
MOMENTUM = 0.9
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


def stepped(lengths, build, expected=lambda _: LR):
    """Steps over lists of f32 tensors. `build(params)` is one step; the first moves by `expected(gradient)` each."""

    def make(_, sets):
        steps, lists = [], []
        for _ in range(sets):
            params = [torch.nn.Parameter(bell(k)) for k in lengths]
            for p in params:
                p.grad = bell(p.numel())
            steps.append(build(params))
            lists.append(params)
        checked = [lists[0][0], lists[0][-1]]
        before = [(p.detach()[:CHECKED].clone(), p.grad[:CHECKED].clone()) for p in checked]
        for step in steps:
            step()
        for p, (old, g) in zip(checked, before, strict=True):
            moved = (p.detach()[:CHECKED] - old).abs()
            expect("p is finite", bool(moved.isfinite().all()))
            moved, right = float(moved.median()), float(torch.as_tensor(expected(g)).median())
            expect(f"p moves by {moved}, not {right}", right == 0 or 0.9 * right < moved < 1.1 * right)
        return lambda i: steps[i]()

    return make


def adamw_of_torch(**how):
    def build(params):
        options = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
        return torch.optim.AdamW(params, **options, **how).step

    return build


def clipped(build):
    def with_clip(params):
        step = build(params)

        def call():
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            step()

        return call

    return with_clip


def sgd_of_torch(params):
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, fused=True).step


def of(package, name, **options):
    """An optimizer of another package, imported when it is needed."""

    def build(params):
        return getattr(importlib.import_module(package), name)(params, lr=LR, **options).step

    return build


def of_bitsandbytes(name, **options):
    return of("bitsandbytes.optim", name, **options)


def adamw_of_torchao(kind):
    return of("torchao.optim", f"AdamW{kind}", betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


BITS8 = of_bitsandbytes("AdamW8bit", betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


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
    part: str
    name: str
    at: str  # the tensors, as the bench program calls them
    copy: str
    ours: list
    theirs: list

    def __post_init__(self):
        """Copies of the bytes of every row beside them, captured ones too where launching takes long."""
        captured = any(spec.graph for spec in self.theirs) and sum(lengths(self.at)) <= 1 << 24
        there = [float(self.copy.removeprefix("copy-"))]
        there += [spec.width for spec in self.theirs if spec.label.startswith("torch copy")]
        words = [case.split("-")[1] for case in self.ours]
        ours = [WIDTHS.get(case, word) for case, word in zip(self.ours, words, strict=True) if word.isdigit()]
        added = []
        for width in sorted({*map(float, ours), *(spec.width for spec in self.theirs)}):
            if all(abs(width / other - 1) > SAME for other in there):
                peer = Theirs(f"torch copy of {width:g} B", width, copy(width))
                added += with_graph(peer) if captured else [peer]
                there.append(width)
        self.theirs = added + self.theirs


SAME = 0.01  # a copy counts as one of the same bytes up to this
PARTS = ["casts", "adamw", "lists", "rules", "sizes", "host", "captured"]
# Bytes an element of those cases whose names say another number, or a rounded one.
WIDTHS = {"adamw-20-stochastic-clip": 24, "adamw-16-stochastic": 16.03125, "adamw-14-fp4-stochastic": 14.03125}


def llama():
    """The tensors of the bench program's list of that name."""
    width, inner, vocabulary = 768, 2048, 32_000
    layer = [width * width] * 4 + [width * inner] * 3 + [width] * 2
    return [vocabulary * width, *(12 * layer), width, vocabulary * width]


def lengths(at):
    """What stands behind the @ of a case of the bench program."""
    if at == "llama":
        return llama()
    if "*" in at:
        rows, columns = map(int, at.split("*"))
        return [rows * columns]
    count, k = at.split("x") if "x" in at else (1, at)
    return [1 << int(k)] * int(count)


def with_graph(peer):
    return [peer, Theirs(f"{peer.label}, graph", peer.width, peer.make, peer.against, True)]


def replayed(names):
    """Of ours, each eager and from a captured graph."""
    return [each for name in names for each in (name, f"{name}-graph")]


def groups(sizes, small, compiled):
    yield Group(
        "casts",
        f"cast bf16 2^{small}",
        str(small),
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
            "casts",
            f"cast bf16 2^{k}",
            str(k),
            "copy-6",
            [cast, "cast-bf16-nearest"],
            [
                Theirs("torch copy", 6, copy(6)),
                Theirs("torch nearest", 6, nearest("bfloat16"), cast),
                *sr,
            ],
        )
        yield Group(
            "casts",
            f"cast fp8 2^{k}",
            str(k),
            "copy-5",
            ["cast-e4m3-stochastic", "cast-e4m3-nearest", "cast-e5m2-stochastic", "cast-e5m2-nearest"],
            [
                Theirs("torch copy", 5, copy(5)),
                Theirs("torch nearest e4m3", 5, nearest("float8_e4m3fn"), "cast-e4m3-stochastic"),
                Theirs("torch nearest e5m2", 5, nearest("float8_e5m2"), "cast-e5m2-stochastic"),
            ],
        )
        yield Group(
            "casts",
            f"cast e2m1 2^{k}",
            str(k),
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
            "adamw",
            f"adamw 20 B 2^{k}",
            str(k),
            "copy-20",
            ours,
            [Theirs("torch copy", 20, copy(20)), *peers],
        )
    for k in sizes:
        yield Group(
            "adamw",
            f"adamw 14 B 2^{k}",
            str(k),
            "copy-14",
            ["adamw-14-stochastic", "adamw-14-nearest"],
            [Theirs("torch copy", 14, copy(14)), Theirs("torch fused, all BF16", 14, torch_adamw("bfloat16"))],
        )
    for k in sizes:
        for width, each in ((16, []), (10, ["adamw-10-all-stochastic"]), (8, ["adamw-8-all-stochastic"])):
            copied = f"copy-{width}.03125"
            yield Group(
                "adamw",
                f"adamw {width} B 2^{k}",
                str(k),
                copied,
                [f"adamw-{width}-stochastic", f"adamw-{width}-nearest", *each],
                [Theirs("torch copy", width + 1 / 32, copy(width + 1 / 32))],
            )
    yield Group(
        "adamw",
        "adamw of few bits 2^26",
        "26",
        "copy-16.03125",
        ["adamw-16-stochastic"],
        [
            Theirs("torch fused, FP32 states", 28, torch_adamw("float32")),
            Theirs("bitsandbytes AdamW8bit", 16.0625, stepped([1 << 26], BITS8)),
            Theirs("torchao AdamWFp8", 16.0625, stepped([1 << 26], adamw_of_torchao("Fp8"))),
            Theirs("torchao AdamW8bit", 16.0625, stepped([1 << 26], adamw_of_torchao("8bit"))),
            Theirs("torchao AdamW4bit", 14.125, stepped([1 << 26], adamw_of_torchao("4bit"))),
        ],
    )
    for k in sizes:
        yield Group(
            "adamw",
            f"adamw 28 B 2^{k}",
            str(k),
            "copy-28",
            ["adamw-28"],
            [Theirs("torch copy", 28, copy(28)), Theirs("torch fused, FP32 states", 28, torch_adamw("float32"))],
        )
    yield from lists()
    yield from rules(sizes[-1])
    yield from other_sizes(sizes)
    yield captured_lists()


def lists():
    """Whole models and many small tensors."""
    here = lengths("llama")
    step, fp8, fp4 = "adamw-20-stochastic", "adamw-16-stochastic", "adamw-14-fp4-stochastic"
    fused = adamw_of_torch(fused=True, capturable=True)
    foreach = adamw_of_torch(foreach=True)
    captured = adamw_of_torch(foreach=True, capturable=True)
    yield Group(
        "lists",
        "adamw llama",
        "llama",
        "copy-20",
        [step, f"{step}-clip", f"{step}-meter", fp8, fp4],
        [
            *with_graph(Theirs("torch fused, FP32 states", 28, stepped(here, fused))),
            *with_graph(Theirs("torch clip + fused, FP32 states", 32, stepped(here, clipped(fused)), f"{step}-clip")),
            Theirs("torch foreach, FP32 states", 28, stepped(here, foreach)),
            Theirs("torch foreach, FP32 states, graph", 28, stepped(here, captured), graph=True),
            Theirs("bitsandbytes AdamW8bit", 16.0625, stepped(here, BITS8), fp8),
            Theirs("torchao AdamWFp8", 16.0625, stepped(here, adamw_of_torchao("Fp8")), fp8),
            Theirs("torchao AdamW4bit", 14.125, stepped(here, adamw_of_torchao("4bit")), fp4),
        ],
    )
    here = lengths("32x16")
    yield Group(
        "lists",
        "adamw 32 x 65,536",
        "32x16",
        "copy-20",
        ["copy-20-graph", *replayed([step]), fp8],
        [
            *with_graph(Theirs("torch fused, FP32 states", 28, stepped(here, fused))),
            Theirs("torch foreach, FP32 states", 28, stepped(here, foreach)),
            Theirs("bitsandbytes AdamW8bit", 16.0625, stepped(here, BITS8), fp8),
        ],
    )


def torch_sgd(here):
    make = stepped(here, sgd_of_torch, lambda g: LR * g.abs())
    return Theirs("torch SGD fused, FP32 state", 20, make, "sgd-16-stochastic")


def torch_adam(here):
    build = of("torch.optim", "Adam", betas=(BETA1, BETA2), eps=EPS, fused=True, capturable=True)
    return Theirs("torch Adam fused, FP32 states", 28, stepped(here, build), "adam-20-stochastic")


def ademamix8bit(here):
    build = of_bitsandbytes("AdEMAMix8bit", weight_decay=DECAY)
    return Theirs("bitsandbytes AdEMAMix8bit", 18.09375, stepped(here, build))


def rules(k):
    """The other optimizers."""
    here = [1 << k]
    yield Group(
        "rules",
        f"sgd and lion 2^{k}",
        str(k),
        "copy-16",
        ["sgd-16-stochastic", "lion-16-stochastic"],
        [
            torch_sgd(here),
            Theirs(
                "bitsandbytes SGD8bit",
                14.03125,
                stepped(here, of_bitsandbytes("SGD8bit", momentum=MOMENTUM), lambda g: LR * g.abs()),
            ),
            Theirs(
                "bitsandbytes Lion8bit",
                14.03125,
                stepped(here, of_bitsandbytes("Lion8bit", weight_decay=DECAY)),
                "lion-16-stochastic",
            ),
        ],
    )
    yield Group(
        "rules",
        f"ademamix 2^{k}",
        str(k),
        "copy-24",
        ["ademamix-24-stochastic", "ademamix-18-stochastic"],
        [ademamix8bit(here)],
    )
    # That LAMB8bit has no trust ratio, so it reads once what ours reads twice; how far it moves is its own affair.
    lamb = of_bitsandbytes("LAMB8bit", weight_decay=DECAY)
    yield Group(
        "rules",
        f"lamb 2^{k}",
        str(k),
        "copy-32",
        ["lamb-32-stochastic"],
        [Theirs("bitsandbytes LAMB8bit", 16.0625, stepped(here, lamb, lambda _: 0.0))],
    )


def other_sizes(sizes):
    """Few elements, by every rule, and a matrix of a large model."""

    def torch_adamw(here):
        fused = adamw_of_torch(fused=True, capturable=True)
        return Theirs("torch fused, FP32 states", 28, stepped(here, fused))

    for k in (8, 12, 16, 20):
        here = [1 << k]
        # Of fewer than 4096 elements bitsandbytes keeps the moments in f32.
        mix = [ademamix8bit(here)] if k >= 12 else []
        for name, width, steps, peers in (
            ("adamw 20 B", 20, ["adamw"], with_graph(torch_adamw(here))),
            ("adam 20 B", 20, ["adam"], with_graph(torch_adam(here))),
            ("sgd and lion", 16, ["sgd", "lion"], with_graph(torch_sgd(here))),
            ("ademamix", 24, ["ademamix"], mix),
            ("lamb", 32, ["lamb"], []),
        ):
            if (name, k) != ("adamw 20 B", 16):  # that one has its group
                ours = [f"copy-{width}-graph", *replayed(f"{rule}-{width}-stochastic" for rule in steps)]
                yield Group("sizes", f"{name} 2^{k}", str(k), f"copy-{width}", ours, peers)
    if max(sizes) > 24:
        at, name = "8192*28672", "8192 x 28,672"
        here = lengths(at)
        yield Group(
            "sizes",
            name,
            at,
            "copy-20",
            ["adamw-20-stochastic", "adam-20-stochastic", "sgd-16-stochastic", "lion-16-stochastic"],
            [torch_adamw(here), torch_adam(here), torch_sgd(here)],
        )
        yield Group("sizes", f"ademamix {name}", at, "copy-24", ["ademamix-24-stochastic"], [ademamix8bit(here)])
        yield Group("sizes", f"lamb {name}", at, "copy-32", ["lamb-32-stochastic"], [])


def captured_lists():
    """Graphs of what may refuse to be captured, and may leave the device in a state: the last of a run."""
    here = lengths("llama")
    fp8, fp4 = "adamw-16-stochastic", "adamw-14-fp4-stochastic"
    return Group(
        "captured",
        "adamw llama, captured",
        "llama",
        "copy-16.03125",
        [fp8, fp4],
        [
            Theirs("torchao AdamWFp8, graph", 16.0625, stepped(here, adamw_of_torchao("Fp8")), fp8, True),
            Theirs("torchao AdamW4bit, graph", 14.125, stepped(here, adamw_of_torchao("4bit")), fp4, True),
            Theirs("bitsandbytes AdamW8bit, graph", 16.0625, stepped(here, BITS8), fp8, True),
        ],
    )


HOST_OURS = [
    "adamw-20-stochastic@10",
    "adamw-20-stochastic@32x16",
    "adamw-20-stochastic@1000x12",
    "cast-bf16-stochastic@10",
]
HOST_THEIRS = [  # each at its tensors
    (Theirs("torch fused AdamW, FP32 states", 28, torch_adamw("float32")), "10"),
    (
        Theirs("torch fused AdamW, FP32 states", 28, stepped(lengths("32x16"), adamw_of_torch(fused=True))),
        "32x16",
    ),
    (Theirs("Triton AdamW SR, BF16 states", 20, triton_adamw), "10"),
    (Theirs("Triton cast SR", 6, triton_cast(1024)), "10"),
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
        call = spec.make(n, sets)
        once = min(self.seconds(call) for _ in range(2))
        self.warm_up = max(SLOW_WARM_UP if once > SLOW else WARM_UP, sets)
        # About a millisecond of bytes and whole turns of the sets, but few enough for the slow ones.
        self.calls = calls = sets * max(1, ceil(min(4e9 / self.moved, 320, SLOW / once) / sets))
        for i in range(self.warm_up):
            call(i % sets)
        torch.cuda.synchronize()

        def lead():
            for i in range(max(1 if once > SLOW else 2, sets)):
                call(i % sets)

        def turn():
            for i in range(calls):
                call(i % sets)

        self.lead, self.turn = lead, turn
        if spec.graph:
            stream = torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    turn()
            except BaseException:
                torch.cuda.set_stream(stream)  # a capture that fails may leave its own
                raise
            graph.replay()
            torch.cuda.synchronize()
            self.memory = call  # the graph knows addresses alone
            self.lead = self.turn = graph.replay

    @staticmethod
    def seconds(call):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

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
        self.moved, self.sets, self.calls, self.warm_up = spec.width * n, 1, 1, WARM_UP

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

    def elapsed(self):
        return time.monotonic() - self.started

    def maker(self, spec, n):
        if self.args.seconds and self.elapsed() > self.args.seconds:
            raise TimeoutError(f"{self.args.seconds:g} s are over")
        return (Dry if self.args.dry_run else Peer)(spec, n)

    def attempt(self, what, work):
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the others go on
            text = f"{type(error).__name__}: {error}"[:2000]
            self.record["errors"].append({"what": what, "error": text})
            print(f"left out: {what}: {text.splitlines()[0]}", file=sys.stderr, flush=True)
            return None

    def group(self, group):
        print(f"{self.elapsed():6.1f} s  {group.name}", file=sys.stderr, flush=True)
        found, n = {}, sum(lengths(group.at))
        if self.args.seconds and self.elapsed() > self.args.seconds:
            raise TimeoutError(f"{self.args.seconds:g} s are over")
        for case in [group.copy, *group.ours]:
            line = f"{case}@{group.at}"
            answer = self.attempt(f"{group.name}: {case}", lambda line=line: self.ours.ask(line))
            if answer:
                found[case] = {"bytes": answer[1], "ours": True, "against": "", "samples": []}
                found[case]["work"] = lambda line=line: self.ours.ask(line)[0]
        for spec in group.theirs:
            peer = self.attempt(f"{group.name}: {spec.label}", lambda spec=spec: self.maker(spec, n))
            if peer:
                is_copy = spec.label.startswith("torch copy")
                against = "" if is_copy else spec.against or next(c for c in group.ours if not c.startswith("copy-"))
                if spec.graph and f"{against}-graph" in group.ours:
                    against += "-graph"
                entry = {"bytes": peer.moved, "sets": peer.sets, "calls": peer.calls, "warm-up": peer.warm_up}
                found[spec.label] = entry | {"ours": False, "against": against, "samples": []}
                found[spec.label]["work"] = peer.sample
            else:
                release(self.args.dry_run)
        order = np.random.default_rng(n)
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
        self.record["elements"][group.name] = n
        peer = found = None
        self.attempt("clear", lambda: self.ours.ask("clear"))
        self.attempt("release", lambda: release(self.args.dry_run))

    def host(self):
        print(f"{self.elapsed():6.1f} s  host time", file=sys.stderr, flush=True)
        for case in HOST_OURS:
            answer = self.attempt(f"host {case}", lambda case=case: self.ours.ask(f"host {case}"))
            if answer:
                self.record["host"][case] = answer[0]
        self.attempt("clear", lambda: self.ours.ask("clear"))
        for spec, at in HOST_THEIRS:
            n = sum(lengths(at))
            work = (lambda: 1.0) if self.args.dry_run else (lambda spec=spec, n=n: host_time(spec, n))
            microseconds = self.attempt(f"host {spec.label} @{at}", work)
            if microseconds:
                self.record["host"][f"{spec.label} @{at}"] = microseconds
        release(self.args.dry_run)


# The table and the goals.


def median(entry):
    return float(np.median(entry["samples"]))


def fastest(group, labels):
    """The label of the least time a byte among those there are."""
    there = [label for label in labels if label in group]
    return min(there, key=lambda label: median(group[label]) / group[label]["bytes"], default=None)


def copies(group):
    return [label for label in group if label.startswith(("copy-", "torch copy"))]


def copy_of(group, label):
    """The fastest copy of as many bytes."""
    moved = group[label]["bytes"]
    return fastest(group, [c for c in copies(group) if abs(group[c]["bytes"] / moved - 1) <= SAME])


def table(record):
    lines = [
        "| group | contender | B/element | warm-ups | median us [p10, p90] | GB/s | time over copy | peer / ours |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, group in record["groups"].items():
        n = record["elements"][name]
        for label, entry in group.items():
            middle, p10, p90 = np.quantile(entry["samples"], [0.5, 0.1, 0.9])
            best, other = copy_of(group, label), entry["against"]
            over = f"{paired(group, label, best) * group[best]['bytes'] / entry['bytes']:.3f}" if best else "-"
            ratio = f"{paired(group, label, other):.3f}" if other in group else "-"
            shown = f"**halfulp** {label}" if entry["ours"] and not label.startswith("copy-") else label
            lines.append(
                f"| {name} | {shown} | {entry['bytes'] / n:.6g} | {entry.get('warm-up', WARM_UP)} "
                f"| {middle:.2f} [{p10:.2f}, {p90:.2f}] | {entry['bytes'] / middle / 1e3:.0f} | {over} | {ratio} |"
            )
    lines += ["", "| host time of one call | us |", "|---|---:|"]
    lines += [f"| {label} | {microseconds:.2f} |" for label, microseconds in record["host"].items()]
    return lines


def paired(group, label, other):
    """The median over the rounds of the ratio of times."""
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
    llama, step = "adamw llama", "adamw-20-stochastic"
    for case, width, bound in ((step, 20, 1.02), (f"{step}-clip", 24, 1.05)):
        copied = f"copy-{width}" if width == 20 else f"torch copy of {width} B"
        time_goal(llama, case, [copied], "copy", bound)
    for case, bound in (("adamw-16-stochastic", 1.06), ("adamw-14-fp4-stochastic", 1.12)):
        time_goal(llama, case, [f"torch copy of {WIDTHS[case]:g} B"], "copy", bound)
        time_goal(llama, case, ["bitsandbytes AdamW8bit"], "bitsandbytes AdamW8bit", 1 / 15)
        for kind in ("Fp8", "4bit"):
            time_goal(llama, case, [f"torchao AdamW{kind}"], f"torchao AdamW{kind}", 1 / 100)
    time_goal(llama, f"{step}-meter", [step], "the step without a meter", 1.02)
    time_goal(llama, step, ["torch fused, FP32 states"], "torch fused", 1 / 1.7)
    small = "adamw 32 x 65,536"
    time_goal(small, step, ["copy-20"], "copy", 1.25)
    time_goal(small, f"{step}-graph", ["copy-20-graph"], "captured copy", 1.25)
    time_goal(small, step, ["torch fused, FP32 states"], "torch fused", 1 / 10)
    for name, case, width, bound in (
        ("sgd and lion", "sgd-16-stochastic", 16, 1.01),
        ("ademamix", "ademamix-24-stochastic", 24, 1.05),
        ("lamb", "lamb-32-stochastic", 32, 1.05),
    ):
        time_goal(f"{name} 2^28", case, [f"copy-{width}"], "copy", bound)
    for tensors, bound in (("10", 6), ("32x16", 10), ("1000x12", 10)):
        host = record["host"].get(f"{step}@{tensors}")
        measured = "-" if host is None else f"{host:.2f} us"
        found.append(
            (f"host time of a step @{tensors} <= {bound} us", measured, None if host is None else host <= bound)
        )
    verdicts = {True: "met", False: "missed", None: "not measured"}
    return [f"target: {target} | measured {measured} | {verdicts[met]}" for target, measured, met in found]


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"{', '.join(PARTS)}, or how a group's name begins")
    parser.add_argument("--seconds", type=float, help="start no group or peer after as many")
    args = parser.parse_args()
    every = list(groups([24] if args.quick else [24, 28], 16, 24))
    for word in args.only or []:
        if word not in PARTS and not any(group.name.startswith(word) for group in every):
            parser.error(f"--only {word}: neither of {', '.join(PARTS)} nor one of {[group.name for group in every]}")

    def wanted(part, name):
        """Names of parts are no beginnings of names."""
        return not args.only or any(part == w if w in PARTS else name.startswith(w) for w in args.only)

    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benches/peers/h200.py " + " ".join(Path(word).name if "/" in word else word for word in sys.argv[1:]),
        "commit": args.commit,
        "dry run": args.dry_run,
        "gpu": output("nvidia-smi", query, "--format=csv,noheader"),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__ if torch else None,
            "cuda of torch": torch.version.cuda if torch else None,
            "triton": triton.__version__ if triton else None,
            "bitsandbytes": version("bitsandbytes"),
            "torchao": version("torchao"),
        },
        "absent": ABSENT,
        "warm-up": WARM_UP,
        "warm-up of slow peers": SLOW_WARM_UP,
        "rounds": 3 if args.quick else 9,
        "groups": {},
        "elements": {},
        "host": {},
        "errors": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if torch:
        torch.manual_seed(1)
    run = Run(args, record)

    def save():
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    for last in (False, True):
        for group in every:
            if wanted(group.part, group.name) and (group.part == "captured") == last:
                run.attempt(group.name, lambda group=group: run.group(group))
                save()
        if not last and wanted("host", "host"):
            run.host()
    run.ours.close()
    record["goals"] = [goal for goal in goals(record) if not args.only or not goal.endswith("not measured")]
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
