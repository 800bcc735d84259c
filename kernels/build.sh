#!/usr/bin/env bash
# Compiles the kernels to PTX, checked in and embedded in the crate: kernels/ptx/*.ptx for sm_80 and up, and
# kernels/ptx/hardware_*.ptx for the two architectures that round stochastically in hardware.
#
#   kernels/build.sh            rewrites kernels/ptx
#   kernels/build.sh --check    fails if kernels/ptx is not what the sources give, or if a kernel, assembled for any of the
#                               architectures below, takes more registers or stack than its budget
#
# Needs no GPU. The compiler is pinned (nvcc 13.0.88 from Python packages, 250 MB) and installed into .cuda on first use;
# NVCC and PTXAS name others.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${NVCC:-}" ]; then
    if [ ! -x .cuda/bin/python ]; then
        python3 -m venv .cuda
    fi
    home=$(echo .cuda/lib/python3.*/site-packages/nvidia/cu13)
    if [ ! -x "$home/bin/nvcc" ]; then
        .cuda/bin/pip install --quiet --disable-pip-version-check nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
            nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
        home=$(echo .cuda/lib/python3.*/site-packages/nvidia/cu13)
    fi
    NVCC=$home/bin/nvcc PTXAS=$home/bin/ptxas
fi
PTXAS=${PTXAS:-$(dirname "$NVCC")/ptxas}

out=kernels/ptx
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out"
for module in {cast,step_adamw,encode}_{f32,bf16,fp16} step_{adam,sgd,lion,ademamix,lamb} blocks_{f32,bf16} any prepare decode norm; do
    kernel=${module%%_*} source=${module#*_}
    "$NVCC" -O3 -std=c++17 -arch=compute_80 -fmad=false -DSOURCE_"${source^^}" -ptx "kernels/$kernel.cu" -o "$out/$module.ptx"
    # PTX 7.1 has all that is used and loads in older drivers, once hints that came later are taken out.
    sed -i -e 's/^\.version .*/.version 7.1/' -e '/\.pragma "used_bytes_mask/d' "$out/$module.ptx"
done
for arch in 100a 103a; do
    "$NVCC" -O3 -std=c++17 -arch=compute_$arch -fmad=false -ptx kernels/hardware.cu -o "$out/hardware_$arch.ptx"
    # The first version that has both architectures.
    sed -i -e 's/^\.version .*/.version 8.8/' -e '/\.pragma "used_bytes_mask/d' "$out/hardware_$arch.ptx"
done
# What the PTX was made of: `cargo test` compares it with the sources.
(cd kernels && sha256sum ./*.cu ./*.cuh build.sh | LC_ALL=C sort -k2) >"$out/sources.sha256"

[ "${1:-}" = --check ] || exit 0
diff -r "$out" kernels/ptx
echo "kernels/ptx is what the sources give"

# Registers a thread: 128 threads of 128 registers leave 4 blocks to a multiprocessor, of 72 leave 7, of 64 leave 8, of 48 leave 10.
budget() {
    case $1 in
    step_*_f32) echo 72 ;;
    step_ademamix) echo 96 ;;
    step_lamb) echo 128 ;;
    step_* | blocks_f32) echo 80 ;;
    blocks_bf16) echo 128 ;;
    any | prepare) echo 128 ;;
    cast_* | hardware_*) echo 48 ;;
    norm | encode_* | decode) echo 64 ;;
    esac
}
# Bytes of a thread's stack, in which registers are spilled: by block steps, in what is rare (another item, divisions as written).
stack() {
    case $1-$2 in
    blocks_*) echo 16 ;;
    *) echo 0 ;;
    esac
}
# assemble ARCHITECTURE FILE
assemble() {
    name=$(basename "$2" .ptx)
    "$PTXAS" -arch=sm_"$1" -v "$2" -o /dev/null 2>&1 | awk -v name="$name" -v arch="$1" -v budget="$(budget "$name")" \
        -v stack="$(stack "$name" "$1")" '
        /bytes stack frame/ { if ($1 > deepest) deepest = $1 }
        /Used [0-9]+ registers/ {
            for (i = 1; i < NF; i++) if ($i == "Used") registers = $(i + 1) + 0
            if (registers > most) most = registers
            count++
        }
        END {
            printf "sm_%-4s %-15s %2d kernels, at most %d registers of %d, %d bytes of stack of %d\n", arch, name, count, most,
                budget, deepest, stack
            exit deepest > stack || most > budget || count == 0
        }'
}
for arch in 80 90 100 120; do
    for ptx in "$out"/{{cast,step,blocks,encode}_*,any,prepare,decode,norm}.ptx; do
        assemble $arch "$ptx"
    done
done
for arch in 100a 103a; do
    assemble $arch "$out/hardware_$arch.ptx"
done
