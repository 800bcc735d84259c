#!/usr/bin/env bash
# Runs public test suites on the words of `examples/stream.rs` and writes what they say to benches/random/results.
#
#   benches/random/run.sh [--install]
#
# It runs the suites it finds: PractRand (`RNG_test` in PATH), TestU01 (its headers; a prefix other than the system's in
# TESTU01=DIR), dieharder. --install gets the last two from Debian: libtestu01-0-dev (section non-free) and dieharder.
# Ten to fifteen minutes without PractRand. Narrower, or longer, with any of
#
#   STREAMS="v1 philox sr-states"  ORDERS="elements steps columns seeds tensors roles"  SEED=0
#   SUITES="practrand testu01 dieharder"  BATTERIES="smallcrush crush rabbit alphabit"  DIEHARDER="0 1"  PRACTRAND=1GB
#
# An unusual p-value is followed by the same test on more or other words: five times the samples (dieharder), two
# more seeds (TestU01).
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ ${1:-} == --install ]]; then
    apt-get install -y --no-install-recommends dieharder libtestu01-0-dev
fi

streams=${STREAMS:-v1 sr-states}
orders=${ORDERS:-elements steps columns}
suites=${SUITES:-practrand testu01 dieharder}
batteries=${BATTERIES:-smallcrush}
seed=${SEED:-0}
far=$((1 << 30)) # from one seed to another: neighbouring seeds are one stream of sr-states
results=benches/random/results
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
mkdir -p "$results"
mkfifo "$build/pipe"

cargo build --release --example stream
stream=${CARGO_TARGET_DIR:-target}/release/examples/stream

has() { [[ " $suites " == *" $1 "* ]]; }

# What was run, what it said, and the bytes it took, to within a pipe's buffer. A suite that closes the pipe ends the
# stream; that is no failure.
run() {
    local arguments=$1
    shift
    echo "\$ stream $arguments | ${*##*/}"
    wc -c <"$build/pipe" >"$build/bytes" &
    { "$stream" $arguments | tee "$build/pipe" | "$@" 2>&1 | grep -v "^$"; } || true
    wait
    echo "bytes: $(cat "$build/bytes")"
}

# A suite on every stream and order, each into a file of its own.
each() {
    for s in $streams; do
        for order in $orders; do
            local file=$results/$1-$s-$order${SEED:+-seed-$SEED}.txt
            { date -u +%F; "on_$1" "--stream $s --order $order --bits 16"; } >"$file"
            echo "$file: $(grep -cE 'PASSED|suspect=0 fail=0|no anomalies' "$file" || true) passed," \
                "$(grep -cE 'WEAK|suspect=[1-9]|unusual|suspicious' "$file" || true) weak," \
                "$(grep -cE 'FAILED|fail=[1-9]|FAIL' "$file" || true) failed"
        done
    done
}

on_practrand() {
    run "$1 --seed $seed" RNG_test stdin64 -tlmax "${PRACTRAND:-1GB}"
}

on_testu01() {
    local battery reversed output other
    for battery in $batteries; do
        for reversed in "" reversed; do
            output=$(run "$1 --seed $seed" "$build/testu01" "$battery" $reversed)
            echo "$output"
            if ! grep -q 'suspect=0 fail=0' <<<"$output"; then
                for other in $((seed + far)) $((seed + 2 * far)); do
                    run "$1 --seed $other" "$build/testu01" "$battery" $reversed
                done
            fi
        done
    done
}

# Diehard birthdays, OPERM5, 6x8 rank, bit stream, ones in a stream and in bytes, parking lot, 2d and 3d distance, runs,
# craps; STS monobit and serial; DAB bytes, DCT, fill tree 2, monobit 2.
tests=${DIEHARDER:-0 1 3 4 8 9 10 11 12 15 16 100 102 205 206 208 209}
lines='^\$|PASSED|WEAK|FAILED|^bytes'

on_dieharder() {
    local test output
    for test in $tests; do
        output=$(run "$1 --seed $seed" dieharder -g 200 -d "$test" | grep -E "$lines")
        echo "$output"
        if grep -qE 'WEAK|FAILED' <<<"$output"; then
            run "$1 --seed $seed" dieharder -g 200 -d "$test" -m 5 | grep -E "$lines"
        fi
    done
}

if has practrand && command -v RNG_test >/dev/null; then
    each practrand
fi
if has testu01; then
    prefix=${TESTU01:-/usr}
    here=$(cc -print-multiarch 2>/dev/null || true)
    flags=(-I"$prefix/include" -I"$prefix/include/$here" -L"$prefix/lib" -L"$prefix/lib/$here")
    if cc -O2 "${flags[@]}" benches/random/testu01.c -o "$build/testu01" \
        -ltestu01 -ltestu01probdist -ltestu01mylib -lm 2>"$build/log"; then
        export LD_LIBRARY_PATH=$prefix/lib:$prefix/lib/$here${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        each testu01
    else
        echo "no TestU01: $(head -n 1 "$build/log")"
    fi
fi
if has dieharder && command -v dieharder >/dev/null; then
    each dieharder
fi
