"""Compares the codes of halfulp with numpy, ml_dtypes and gfloat, bit for bit.

    pip install -r tests/oracles/requirements.txt
    python tests/oracles/oracles.py                 # everything: all 2^32 f32, millions of f64, few random bits
    python tests/oracles/oracles.py f32 --thin 64   # every 64th chunk of 2^24

One line a comparison; exit code 1 if anything differed. README.md says what is compared and what is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
from gfloat import Domain, FormatInfo, RoundMode, decode_ndarray, encode_ndarray, formats, round_ndarray

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1 << 24


def unsigned(width):
    return np.uint8 if width <= 8 else np.uint16


# The crate, as a filter.


class Codes:
    """The `codes` example."""

    def __init__(self, path, folder):
        self.path, self.folder = path, Path(folder)

    def put(self, records):
        """Writes the input of the calls that follow."""
        records.tofile(self.folder / "in")

    def __call__(self, source, to, width, **options):
        command = [self.path, "--from", source, "--to", to]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with open(self.folder / "in", "rb") as stdin, open(self.folder / "out", "wb") as stdout:
            subprocess.run(command, stdin=stdin, stdout=stdout, check=True)
        return np.fromfile(self.folder / "out", unsigned(width))


def built():
    """Builds the example and says where it is."""
    subprocess.run(["cargo", "build", "--release", "--example", "codes"], cwd=ROOT, check=True)
    metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps"]
    found = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True).stdout
    return Path(json.loads(found)["target_directory"]) / "release" / "examples" / "codes"


# Counting.


class Tally:
    """Counts one comparison and shows its first disagreements."""

    failed = False
    SHOWN = 10

    def __init__(self, name, left_out=""):
        self.name, self.left_out = name, left_out
        self.compared = self.excluded = self.different = 0

    def add(self, same, theirs, ours, describe, excluded=0):
        self.compared += same.size
        self.excluded += int(excluded)
        bad = np.flatnonzero(~same)
        for i in bad[: max(0, self.SHOWN - self.different)]:
            print(f"  {self.name}: {describe(i)} theirs {theirs[i]:#x} ours {ours[i]:#x}")
        self.different += bad.size

    def close(self):
        Tally.failed |= self.different > 0
        out = f", {self.excluded:,} left out: {self.left_out}" if self.excluded else ""
        print(f"{self.name}: {self.compared:,} compared, {self.different:,} differ{out}", flush=True)


# (a) nearest from f32: every input.


@dataclass
class Peer:
    """A cast of somebody else."""

    to: str
    name: str
    cast: Callable
    width: int
    infinity: int | None  # magnitudes above it are NaN; None where there is no NaN
    overflow: str = "ieee"
    round: str = "nearest"
    signed: bool = True
    left_out: str = ""


def peers():
    """numpy and ml_dtypes, and PyTorch where it is installed."""
    no_nan = "NaN, which the format has not (ours: the largest value; ml_dtypes: a zero)"
    away = "zeros (ours: code 0, the smallest value; ml_dtypes: NaN), 2^-127 < x < 1.5 * 2^-127 (ml_dtypes: 2^-126)"
    ties = away + ", ties 1.5 * 2^k (ours: to the even code; ml_dtypes: up)"
    numpy = {"f16": ("numpy float16", np.float16, 16, 0x7C00)}
    names = {
        "bf16": ("bfloat16", 16, 0x7F80),
        "e4m3": ("float8_e4m3fn", 8, 0x7E),
        "e5m2": ("float8_e5m2", 8, 0x7C),
        "e3m2": ("float6_e3m2fn", 6, None, "saturate", "nearest", True, no_nan),
        "e2m3": ("float6_e2m3fn", 6, None, "saturate", "nearest", True, no_nan),
        "e2m1": ("float4_e2m1fn", 4, None, "saturate", "nearest", True, no_nan),
        "e8m0": ("float8_e8m0fnu", 8, 0xFE, "ieee", "nearest", False, ties),
    }
    found = []
    for to, (name, dtype, *rest) in numpy.items():
        found.append(Peer(to, name, lambda x, t=dtype: x.astype(t), *rest))
    for to, (name, *rest) in names.items():
        dtype = getattr(ml_dtypes, name)
        found.append(Peer(to, f"ml_dtypes {name}", lambda x, t=dtype: x.astype(t), *rest))
    found.append(Peer("e8m0", found[-1].name, found[-1].cast, 8, 0xFE, "ieee", "away", False, away))
    try:
        import torch
    except ImportError:
        return found

    def e4m3fn(x):
        return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return [*found, Peer("e4m3", f"torch {torch.__version__} float8_e4m3fn", e4m3fn, 8, 0x7E, "saturate")]


def same_f32(peer, bits, theirs, ours):
    """Which codes agree, and which inputs are left out."""
    same = theirs == ours
    left_out = None
    if peer.infinity is None:
        left_out = bits & 0x7FFFFFFF > 0x7F800000
    elif not same.all():
        # NaN is one class; its sign counts where the format has one.
        sign = 1 << (peer.width - 1) if peer.signed else 0
        magnitude = (1 << peer.width) - 1 - sign
        both_nan = (theirs & magnitude > peer.infinity) & (ours & magnitude > peer.infinity)
        same |= both_nan & (theirs & sign == ours & sign)
    if peer.to == "e8m0":
        left_out = (bits & 0x7FFFFFFF == 0) | (bits > 0x400000) & (bits < 0x600000)
        if peer.round == "nearest":
            normal = (bits >= 0x800000) & (bits < 0x7F800000)
            left_out |= normal & (bits & 0x7FFFFF == 0x400000) | (bits == 0x600000)
    return same, left_out


def f32(codes, only, thin, rng):
    chunks = range(int(rng.integers(thin)), 256, thin)
    chosen = [peer for peer in peers() if peer.to in only]
    contenders = [(p, Tally(f"{p.to} {p.round} {p.overflow} f32, {p.name}", p.left_out)) for p in chosen]
    started = time.monotonic()
    for done, chunk in enumerate(chunks):
        bits = np.arange(CHUNK, dtype=np.uint32) + np.uint32(chunk * CHUNK)
        codes.put(bits)
        for peer, tally in contenders:
            with np.errstate(all="ignore"):
                theirs = peer.cast(bits.view(np.float32)).view(unsigned(peer.width))
            ours = codes("f32", peer.to, peer.width, round=peer.round, overflow=peer.overflow)
            same, left_out = same_f32(peer, bits, theirs, ours)
            x, excluded = bits, 0
            if left_out is not None and left_out.any():
                x, same, theirs, ours = (a[~left_out] for a in (x, same, theirs, ours))
                excluded = np.count_nonzero(left_out)
            tally.add(same, theirs, ours, lambda i, x=x: f"x {x[i]:#010x}", excluded)
        seconds = time.monotonic() - started
        print(f"\rchunk {chunk}, {done + 1} of {len(chunks)}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for _, tally in contenders:
        tally.close()


# (b) and (c): gfloat.


def described(name, k, precision, bias, nan):
    """An unsigned format that gfloat can describe but does not name."""
    return FormatInfo(
        name, k, precision, bias=bias, is_signed=False, domain=Domain.Finite, has_nz=False, num_high_nans=nan,
        has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip


FORMATS = {
    "bf16": formats.format_info_bfloat16,
    "f16": formats.format_info_binary16,
    "e4m3": formats.format_info_ocp_e4m3,
    "e5m2": formats.format_info_ocp_e5m2,
    "e3m2": formats.format_info_ocp_e3m2,
    "e2m3": formats.format_info_ocp_e2m3,
    "e2m1": formats.format_info_ocp_e2m1,
    "e8m0": formats.format_info_ocp_e8m0,
    "ue5m3": described("UE5M3", 8, 4, 15, 1),
    "ue4m4": described("UE4M4", 8, 5, 7, 1),
    "ue2m2": described("UE2M2", 4, 3, 1, 0),
}


def values(info):
    """The finite values from the smallest up, and the next one as if exponents did not end."""
    half = np.arange(1 << (info.bits - info.is_signed))
    v = decode_ndarray(info, half)
    v = v[np.isfinite(v)]
    return np.append(v, v[-1] + (v[-1] - v[-2] if info.precision > 1 else v[-1]))


def significance(info, x):
    """Exponent of the spacing of the format around each x."""
    exponent = np.frexp(x)[1] - 1
    if info.has_subnormals:
        exponent = np.maximum(exponent, 1 - info.bias)
    return exponent - info.precision + 1


def policies(info):
    """Saturate, and IEEE where gfloat has something to overflow to."""
    return [("saturate", True)] + ([("ieee", False)] if info.num_nans else [])


def domain(info, x):
    """The inputs whose result gfloat defines, and says as we do."""
    keep = np.ones(x.shape, bool)
    if not info.num_nans:
        keep &= ~np.isnan(x)
    if not info.is_signed:
        keep &= np.isnan(x) | ~np.signbit(x)
    if not info.has_subnormals:
        keep &= np.isnan(x) | (x >= info.min)
    return keep


def encoded(info, rounded):
    return encode_ndarray(info, rounded).astype(unsigned(info.bits))


def same_f64(info, x, theirs, ours):
    """gfloat gives one NaN, whatever the sign; ours keeps it."""
    if not info.num_nans:
        return theirs == ours
    negative = np.signbit(x) & info.is_signed
    ours_nan = np.isnan(decode_ndarray(info, ours.astype(np.int64)))
    sign_kept = (ours >> (info.bits - 1) != 0) == negative if info.is_signed else True
    theirs_nan = np.isnan(decode_ndarray(info, theirs.astype(np.int64)))
    return np.where(theirs_nan, ours_nan & sign_kept, theirs == ours)


def around(x):
    """Each f64 with those next to it, by 1 and 2 in the last place and by less than half an f32 can tell."""
    bits = x.view(np.int64)
    steps = [-2, -1, 0, 1, 2, -(1 << 27), 1 << 27, -(1 << 28) - 1, (1 << 28) + 1]
    return np.concatenate([bits + step for step in steps if step >= 0 or (bits > -step).all()]).view(np.float64)


def f64_inputs(info, count, rng):
    v = values(info)
    middle = (v[1:] + v[:-1]) / 2
    exact = np.concatenate([middle, v[v > 0]])
    traps = around(exact)
    anywhere = rng.integers(0, 1 << 64, count, dtype=np.uint64).view(np.float64)
    low, high = int(np.log2(v[v > 0][0])) - 4, int(np.log2(v[-1])) + 2
    within = np.ldexp(1 + rng.random(count), rng.integers(low, high, count))
    special = np.array([0.0, np.inf, np.nan, 5e-324, 2.0**-1022, np.finfo(np.float64).max])
    positive = np.concatenate([special, traps, within])
    return np.concatenate([positive, -positive, anywhere])


MODES = {
    "nearest": RoundMode.TiesToEven,
    "away": RoundMode.TiesToAway,
    "zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}


def f64(codes, only, count, rng):
    for to in only:
        info = FORMATS[to]
        x = f64_inputs(info, count, rng)
        keep = domain(info, x)
        x, excluded = x[keep], np.count_nonzero(~keep)
        codes.put(x)
        left_out = [] if info.num_nans else ["NaN"]
        left_out += [] if info.is_signed else ["negatives"]
        left_out += [] if info.has_subnormals else ["below the smallest value"]
        for mode, theirs_mode in MODES.items():
            for overflow, saturate in policies(info):
                tally = Tally(f"{to} {mode} {overflow} f64, gfloat", " and ".join(left_out))
                with np.errstate(all="ignore"):
                    theirs = encoded(info, round_ndarray(info, x, theirs_mode, saturate))
                ours = codes("f64", to, info.bits, round=mode, overflow=overflow)
                same = same_f64(info, x, theirs, ours)
                tally.add(same, theirs, ours, lambda i, x=x: f"x {x.view(np.uint64)[i]:#018x}", excluded)
                tally.close()


RULES = {
    "centred": RoundMode.StochasticFast,
    "floor": RoundMode.StochasticFastest,
    "nearest": RoundMode.Stochastic,
}


def few_bits_inputs(info, n, count, rng):
    """Values and draws: draws next to the one that decides, for fractions of n + 3 bits and a little more or less."""
    v = values(info)
    i = rng.integers(0, len(v) - 1, count)
    # Half of them in the lowest values, where formats are subnormal.
    i[::2] %= min(len(v) - 1, max(8, len(v) // 16))
    low, high = v[i], v[i + 1]
    part = rng.integers(0, 1 << (n + 3), count) / float(1 << (n + 3))
    x = low + (high - low) * part
    x = np.where(x > v[0], (x.view(np.int64) + rng.choice([-1, 0, 0, 0, 1], count)).view(np.float64), x)
    d = (x - low) / (high - low)
    decides = (1 << n) - np.floor(d * (1 << n)).astype(np.int64)
    r = np.where(rng.random(count) < 0.75, decides + rng.integers(-2, 2, count), rng.integers(0, 1 << n, count))
    if info.is_signed:
        x = np.copysign(x, rng.choice([-1.0, 1.0], count))
    return x, np.clip(r, 0, (1 << n) - 1)


def few_bits(codes, only, count, rng):
    for to in only:
        info = FORMATS[to]
        for rule, mode in RULES.items():
            for overflow, saturate in policies(info):
                tally = Tally(f"{to} {rule} {overflow} 1-16 bits f64, gfloat", "sums that gfloat's f64 rounds")
                for n in range(1, 17):
                    x, r = few_bits_inputs(info, n, count, rng)
                    # Fraction + draw is exact in f64 if the fraction is a multiple of 2^-53; "nearest" adds integers.
                    t = np.ldexp(np.abs(x), 53 - significance(info, x))
                    exact = (t == np.floor(t)) | (rule == "nearest")
                    excluded = np.count_nonzero(~exact)
                    x, r = x[exact], r[exact]
                    records = np.empty(x.size, [("x", "<f8"), ("r", "<u4")])
                    records["x"], records["r"] = x, r
                    codes.put(records)
                    theirs = encoded(info, round_ndarray(info, x, mode, saturate, srbits=r, srnumbits=n))
                    ours = codes("f64", to, info.bits, round="stochastic", bits=n, rule=rule, overflow=overflow)

                    def describe(i, x=x, r=r, n=n):
                        return f"x {x.view(np.uint64)[i]:#018x} draw {r[i]:#x} of {n} bits"

                    tally.add(same_f64(info, x, theirs, ours), theirs, ours, describe, excluded)
                tally.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="f32, f64, bits (default: all)")
    parser.add_argument("--codes", type=Path, help="the built example, in place of building it")
    parser.add_argument("--only", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--thin", type=int, default=1, metavar="N", help="every Nth of the 256 chunks of f32")
    parser.add_argument("--count", type=int, default=1 << 22, help="random f64 a format (twice: anywhere, in range)")
    parser.add_argument("--bits-count", type=int, default=1 << 18, help="values a format, rule and number of bits")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    parts = args.parts or ["f32", "f64", "bits"]
    if unknown := set(parts) - {"f32", "f64", "bits"}:
        parser.error(f"expected f32, f64 or bits, got {', '.join(sorted(unknown))}")
    rng = np.random.default_rng(args.seed)
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, gfloat {version('gfloat')}, seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder:
        codes = Codes(args.codes or built(), folder)
        if "f32" in parts:
            f32(codes, args.only, args.thin, rng)
        if "f64" in parts:
            f64(codes, args.only, args.count, rng)
        if "bits" in parts:
            few_bits(codes, args.only, args.bits_count, rng)
    sys.exit(Tally.failed)


if __name__ == "__main__":
    main()
