//! The meter: what counts as stalled, in every way a state is stored.
#![cfg(feature = "stall")]

use halfulp::optim::{AdamW, AdamWConfig, Rounding, StateFormat, States};
use halfulp::random::Role;
use halfulp::stall::{Comparison, MeterError, Scaling, StallCounts, State, StateView, Storage};
use halfulp::{E4M3, Format, UE2M2Nz, bf16, nearest_cast};

/// Stalled, moved, NaN, untouched, same code.
fn counts(comparison: Comparison<'_>) -> [u64; 5] {
    let StallCounts { stalled, moved, nan, untouched, same_code, .. } = comparison.count().unwrap();
    [stalled, moved, nan, untouched, same_code]
}

#[test]
fn values_are_compared_as_reals() {
    let old = [0.0f32, -0.0, 1.0, 1.0, f32::NAN, f32::NAN, 1.0, f32::INFINITY, 1e-45];
    let new = [-0.0f32, 0.0, 1.0, 1.5, f32::NAN, 1.0, f32::NAN, f32::INFINITY, 0.0];
    assert_eq!(counts(Comparison::new(&old[..], &new[..])), [4, 2, 3, 0, 4]);
    let [old, new]: [Vec<bf16>; 2] = [&old, &new].map(|x| nearest_cast(x));
    assert_eq!(counts(Comparison::new(&old[..], &new[..])), [5, 1, 3, 0, 5]);
    let [old, new]: [Vec<E4M3>; 2] = [&[0.0f32, -0.0, 1.0, 2.0], &[-0.0f32, 0.0, 1.0, 2.25]].map(|x| nearest_cast(x));
    assert_eq!(counts(Comparison::new(&old[..], &new[..])), [3, 1, 0, 0, 3]);
    // A format without zero: code 0 is a number like others.
    let [old, new]: [Vec<UE2M2Nz>; 2] = [&[0.125f32, 0.125], &[0.125f32, 0.25]].map(|x| nearest_cast(x));
    assert_eq!(counts(Comparison::new(&old[..], &new[..])), [1, 1, 0, 0, 1]);
    // Formats may differ.
    assert_eq!(counts(Comparison::new(&[1.0f32, 1.001][..], &[bf16::ONE; 2][..])), [1, 1, 0, 0, 1]);
}

#[test]
fn untouched_coordinates_are_apart() {
    let (g, old) = ([0.0f32, -0.0, 0.0, 1.0, f32::NAN], [0.0f32, -0.0, 1.0, 0.0, 0.0]);
    let new = [0.0f32, 0.0, 1.0, 0.0, f32::NAN];
    assert_eq!(counts(Comparison::new(&old[..], &new[..]).gradients(&g)), [2, 0, 1, 2, 2]);
    assert_eq!(counts(Comparison::new(&old[..], &new[..])), [4, 0, 1, 0, 4]);
    // A first moment is judged by its second moment.
    let (m, new_m) = ([0.5f32, 0.0, 0.0, 0.0, 0.0], [0.45f32, 0.0, 0.0, 0.1, f32::NAN]);
    let first = Comparison::new(&m[..], &new_m[..]).gradients(&g);
    assert_eq!(counts(first.second_moment(&old[..])), [1, 1, 1, 2, 1]);
    assert_eq!(counts(first), [0, 2, 1, 2, 0]);
}

#[test]
fn blocks_have_scales() {
    // 1 * 1 = .5 * 2: the same number from other codes.
    let (one, half, two) = (0x38, 0x30, 0x40);
    let (old, new, moved) = ([one; 5], [half, one, one, two, one], [one, one, 0x39, one, one]);
    let old = StateView::codes(&old, Format::E4M3).scaled(&[1.0; 3], 2);
    let new = StateView::codes(&new, Format::E4M3).scaled(&[2.0, 1.0, f32::NAN], 2);
    assert_eq!(counts(Comparison::new(old, new)), [2, 2, 1, 0, 2]);
    assert_eq!((old.len(), new.value(0), new.value(3)), (5, 1.0, 2.0));
    // The grid moves by a hair: nothing is equal, and the code that the old value rounds to stays.
    let moved = StateView::codes(&moved, Format::E4M3).scaled(&[1.001, 1.0, 1.0], 2);
    assert_eq!(counts(Comparison::new(old, moved)), [2, 3, 0, 0, 4]);
    // Without scales the grid is still, and what moved has another code.
    let (codes, others) = ([one, one], [one, two]);
    let [old, new] = [&codes, &others].map(|codes| StateView::codes(codes, Format::E4M3));
    assert_eq!(counts(Comparison::new(old, new)), [1, 1, 0, 0, 1]);
}

#[test]
fn states_and_moments() {
    let mut before =
        State::zeroed(Storage::nearest(Format::E4M3).scaled(Scaling::Amax { block: 3 }), Role::SecondMoment, 6)
            .unwrap();
    before.store(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1).unwrap();
    let mut after = before.clone();
    after.store(&[1.0, 2.0, 3.01, 4.0, 5.0, 6.0], 2).unwrap();
    let seen = Comparison::new(before.view(), after.view()).count().unwrap();
    assert_eq!((seen.stalled, seen.moved, seen.same_code), (3, 3, 6));

    let mut optimizer = AdamW::new(AdamWConfig::default(), StateFormat::Bf16, Rounding::Nearest).unwrap();
    let mut params = vec![1.0f32; 3];
    optimizer.step(&mut params, &[1.0, 0.0, 1.0]).unwrap();
    let (old_m, old_v) = optimizer.moments(0).map(|(m, v)| (m.clone(), v.clone())).unwrap();
    let gradients = [0.0, 0.0, 8.0];
    optimizer.step(&mut params, &gradients).unwrap();
    let (m, v) = optimizer.moments(0).unwrap();
    // Without a gradient the first moment decays by a tenth, and the second by a thousandth that BF16 cannot show.
    assert_eq!(counts(Comparison::new(&old_v, v).gradients(&gradients)), [1, 1, 0, 1, 1]);
    let first = Comparison::new(&old_m, m).gradients(&gradients).second_moment(&old_v);
    assert_eq!(counts(first), [0, 2, 0, 1, 0]);
}

/// Moments in blocks are read through their scales, whole bytes or not.
#[test]
fn moments_in_blocks() {
    for states in [States { m: StateFormat::E4M3, v: StateFormat::UE4M4 }, States::FP4] {
        let mut optimizer = AdamW::new(AdamWConfig::default(), states, Rounding::stochastic(1)).unwrap();
        let mut params = vec![1.0f32; 301];
        let g: Vec<f32> = (0..301).map(|i| 1.0 + (i % 7) as f32).collect();
        optimizer.step(&mut params, &g).unwrap();
        let (old_m, old_v) = optimizer.moments(0).map(|(m, v)| (m.clone(), v.clone())).unwrap();
        optimizer.step(&mut params, &g).unwrap();
        let (m, v) = optimizer.moments(0).unwrap();
        for (old, new) in [(&old_m, m), (&old_v, v)] {
            let [before, after] = [old, new].map(|moment| moment.to_f32());
            let stalled = before.iter().zip(&after).filter(|(a, b)| a == b).count() as u64;
            let seen = Comparison::new(old, new).gradients(&g).count().unwrap();
            assert_eq!((seen.stalled, seen.moved), (stalled, 301 - stalled));
            assert!(seen.moved > 0 && seen.same_code >= seen.stalled);
        }
        // A NaN takes its block along.
        let mut bad = g.clone();
        bad[0] = f32::NAN;
        optimizer.step(&mut params, &bad).unwrap();
        assert_eq!(Comparison::new(&old_v, optimizer.moments(0).unwrap().1).count().unwrap().nan, 128);
    }
}

#[test]
fn counts_add_up() {
    // More than one chunk, and an end that fills none.
    let old: Vec<f32> = (0..100_003).map(|i| i as f32).collect();
    let new: Vec<f32> = old.iter().map(|x| if x % 3.0 == 0.0 { x + 1.0 } else { *x }).collect();
    let whole = Comparison::new(&old[..], &new[..]).count().unwrap();
    assert_eq!((whole.stalled, whole.moved, whole.counted()), (66_668, 33_335, 100_003));
    let parts = [0..1, 1..70_001, 70_001..100_003].map(|r| Comparison::new(&old[r.clone()], &new[r]).count().unwrap());
    assert_eq!(parts.into_iter().sum::<StallCounts>(), whole);
    assert_eq!(parts[2] + parts[0] + parts[1], whole);
    assert_eq!(whole.share(), 66_668.0 / 100_003.0);
    assert!(StallCounts::default().share().is_nan());
}

#[test]
fn errors() {
    let x = [1.0f32; 5];
    let ok = Comparison::new(&x[..], &x[..]);
    let text = |comparison: Comparison<'_>| comparison.count().unwrap_err().to_string();
    let length = "expected 5 elements, as in the old state, got 4";
    assert_eq!(text(Comparison::new(&x[..], &x[..4])), format!("new: {length}"));
    assert_eq!(text(ok.gradients(&x[..4])), format!("gradients: {length}"));
    assert_eq!(text(ok.second_moment(&x[..4])), format!("second_moment: {length}"));
    let view = StateView::from(&x[..]);
    assert_eq!(text(Comparison::new(view.scaled(&[1.0; 2], 2), view)), "old: expected 3 scales, one a block, got 2");
    assert_eq!(text(Comparison::new(view, view.scaled(&[1.0; 4], 2))), "new: expected 3 scales, one a block, got 4");
    let no_block = Comparison::new(view, view.scaled(&[], 0)).count();
    assert_eq!(no_block, Err(MeterError::Block { argument: "new" }));
}
