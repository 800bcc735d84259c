//! The gradient norm: the written tree, shards, order, threads, specials; the clip coefficient.
#![cfg(feature = "std")]

mod common;

use common::Inputs;
use halfulp::optim::{ChunkSums, Clip, Clipped, GradientNorm, NonFinite, NormError, Real, Shard, ShardError};
use halfulp::{bf16, f16};

/// The tree as its definition reads: `term(i)` is what place `i` of a chunk holds.
fn tree(term: &dyn Fn(usize) -> f64) -> f64 {
    fn sum(term: &dyn Fn(usize) -> f64, first: usize, lanes: usize) -> f64 {
        match lanes {
            1 => (0..8).fold(0.0, |sum, round| sum + term(first + 512 * round)),
            _ => sum(term, first, lanes / 2) + sum(term, first + lanes / 2, lanes / 2),
        }
    }
    sum(term, 0, 512)
}

fn chunks(x: &[f64]) -> Vec<f64> {
    x.chunks(4096).map(|chunk| tree(&|i| chunk.get(i).map_or(0.0, |x| x * x))).collect()
}

fn combined(mut sums: Vec<f64>) -> f64 {
    while sums.len() > 1 {
        sums = sums.chunks(4096).map(|run| tree(&|i| run.get(i).copied().unwrap_or(0.0))).collect();
    }
    sums.first().copied().unwrap_or(0.0)
}

/// Gradients over eight binades, so that the order of additions shows.
fn gradients(n: usize, seed: u64) -> Vec<f32> {
    let mut inputs = Inputs(seed);
    let mut next = || {
        let word = inputs.next();
        f32::from_bits((word as u32 & 0x807F_FFFF) | (117 + (word >> 32) as u32 % 8) << 23)
    };
    (0..n).map(|_| next()).collect()
}

fn bits(sums: &[f64]) -> Vec<u64> {
    sums.iter().map(|sum| sum.to_bits()).collect()
}

#[test]
fn sums_are_the_written_tree() {
    fn check<G: Real>(x: &[G], value: impl Fn(&G) -> f64) {
        let values: Vec<f64> = x.iter().map(value).collect();
        let got = ChunkSums::of(1, x);
        assert_eq!(bits(got.sums()), bits(&chunks(&values)), "{}", x.len());
        let norm = GradientNorm::gather([&got]).unwrap();
        assert_eq!(norm.sum_of_squares().to_bits(), combined(chunks(&values)).to_bits());
        assert_eq!(norm.value(), norm.sum_of_squares().sqrt());
    }
    for n in [0, 1, 3, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193, 50_000] {
        let x = gradients(n, n as u64);
        check(&x, |&x| x.into());
        check(&x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), |&x| x.into());
        check(&x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), |&x| f64::from(x.to_f32()));
    }
}

/// The order of these gradients' sum shows: the tree is not a plain sum, nor one of another number of lanes.
#[test]
fn another_order_is_told_apart() {
    let x = gradients(4096, 5);
    let squares: Vec<f64> = x.iter().map(|&x| f64::from(x) * f64::from(x)).collect();
    let got = ChunkSums::of(0, &x).sums()[0];
    assert_ne!(got, squares.iter().sum::<f64>());
    let strided =
        |lanes: usize| -> f64 { (0..lanes).map(|lane| squares[lane..].iter().step_by(lanes).sum::<f64>()).sum() };
    assert!([8, 128, 256, 512, 1024].iter().all(|&lanes| strided(lanes) != got));
}

/// More than 4096 chunks: the tree has two levels, for which sums alone will do.
#[test]
fn many_chunks() {
    for n in [4096usize, 4097, 10_000, 70_000] {
        let sums: Vec<f64> = gradients(n, 9).iter().map(|&x| f64::from(x).abs()).collect();
        let part = ChunkSums::from_sums(3, Shard::whole(4096 * n as u64), sums.clone()).unwrap();
        let norm = GradientNorm::gather([&part]).unwrap();
        assert_eq!(norm.sum_of_squares().to_bits(), combined(sums).to_bits());
    }
}

#[test]
fn shards_are_the_whole() {
    let tensors = [gradients(30_000, 1), gradients(0, 2), gradients(4096, 3), gradients(17, 4), gradients(100_001, 5)];
    let ids = [40, 7, 8, 5, 1];
    let whole: Vec<ChunkSums> = ids.iter().zip(&tensors).map(|(&id, x)| ChunkSums::of(id, x)).collect();
    let expected = GradientNorm::gather(&whole).unwrap();
    // By ascending id, whatever the order of the list.
    let in_order: Vec<f64> = [4, 3, 1, 2, 0].iter().flat_map(|&i: &usize| whole[i].sums()).copied().collect();
    assert_eq!(expected.sum_of_squares().to_bits(), combined(in_order).to_bits());
    assert_eq!(GradientNorm::gather(whole.iter().rev()).unwrap(), expected);
    let mut inputs = Inputs(11);
    for ranks in [1, 2, 3, 7] {
        let mut parts = vec![];
        for (&id, x) in ids.iter().zip(&tensors) {
            let total = x.len() as u64;
            let mut cuts: Vec<u64> =
                (1..ranks).map(|_| (inputs.next() % (total + 1)).next_multiple_of(4096).min(total)).collect();
            cuts.extend([0, total]);
            cuts.sort_unstable();
            for cut in cuts.windows(2) {
                let shard = Shard::new(cut[0]..cut[1], total).unwrap();
                let own = &x[cut[0] as usize..cut[1] as usize];
                parts.push(ChunkSums::of_shard(id, shard, own).unwrap());
            }
        }
        parts.sort_by_cached_key(|_| inputs.next());
        let received =
            parts.iter().map(|part| ChunkSums::from_sums(part.tensor(), part.shard(), part.sums().to_vec()).unwrap());
        assert_eq!(GradientNorm::gather(&received.collect::<Vec<_>>()).unwrap(), expected, "{ranks} ranks");
    }
}

#[test]
fn refusals() {
    let shard = |range| Shard::new(range, 10_000).unwrap();
    let x = vec![1f32; 10_000];
    assert!(matches!(
        Shard::new(0..100, 10_000).map_err(NormError::from),
        Err(NormError::Shard(ShardError::Cut { .. }))
    ));
    let error = ChunkSums::of_shard(5, shard(0..4096), &x).unwrap_err();
    assert_eq!(error.to_string(), "grads of tensor 5: expected 4096, got 10000");
    let error = ChunkSums::from_sums(5, shard(0..10_000), vec![1.0; 2]).unwrap_err();
    assert_eq!(error.to_string(), "sums of tensor 5: expected 3, got 2");
    assert!(matches!(ChunkSums::from_sums(5, shard(0..4096), vec![-1.0]), Err(NormError::Range { .. })));

    let part = |range: std::ops::Range<u64>| {
        let own = &x[range.start as usize..range.end as usize];
        ChunkSums::of_shard(5, shard(range), own).unwrap()
    };
    let gather = |parts: &[ChunkSums]| GradientNorm::gather(parts).map(GradientNorm::value);
    let cover = |expected, got| Err(NormError::Cover { tensor: 5, expected, got });
    assert_eq!(gather(&[part(0..4096), part(4096..10_000)]), Ok(100.0));
    assert_eq!(gather(&[part(0..4096), part(8192..10_000)]), cover(4096, 8192));
    assert_eq!(gather(&[part(0..8192), part(4096..10_000)]), cover(8192, 4096));
    assert_eq!(gather(&[part(4096..10_000)]), cover(0, 4096));
    assert_eq!(gather(&[part(0..8192)]), cover(8192, 10_000));
    assert_eq!(gather(&[part(0..10_000), part(0..10_000)]), cover(10_000, 0));
    let other = ChunkSums::of_shard(5, Shard::new(4096..8192, 8192).unwrap(), &x[..4096]).unwrap();
    assert_eq!(gather(&[part(0..4096), other]), Err(NormError::Total { tensor: 5, expected: 10_000, got: 8192 }));
    assert_eq!(gather(&[]), Ok(0.0));
}

/// A NaN or an infinity anywhere shows in the sum of its chunk and in the norm; nothing finite overflows.
#[test]
fn specials() {
    for at in [0, 4095, 4096, 9_999] {
        for (bad, expected) in
            [(f32::INFINITY, f64::INFINITY), (f32::NEG_INFINITY, f64::INFINITY), (f32::NAN, f64::NAN)]
        {
            let mut x = vec![1f32; 10_000];
            x[at] = bad;
            let sums = ChunkSums::of(0, &x);
            let norm = GradientNorm::gather([&sums]).unwrap();
            assert!(!norm.is_finite());
            assert_eq!(norm.sum_of_squares().to_bits(), expected.to_bits());
            assert_eq!(sums.sums().iter().filter(|sum| !sum.is_finite()).count(), 1);
        }
    }
    let mut both = vec![f32::INFINITY; 10];
    both[3] = f32::from_bits(0xFFFF_FFFF);
    assert_eq!(ChunkSums::of(0, &both).sums()[0].to_bits(), f64::NAN.to_bits());
    let largest = GradientNorm::gather([&ChunkSums::of(0, &[f32::MAX; 8192])]).unwrap();
    assert_eq!(largest.sum_of_squares(), 8192.0 * f64::from(f32::MAX).powi(2));
    let smallest = f32::from_bits(1);
    let tiny = GradientNorm::gather([&ChunkSums::of(0, &[smallest; 4])]).unwrap();
    assert_eq!(tiny.value(), 2.0 * f64::from(smallest));
    assert_eq!(GradientNorm::gather([&ChunkSums::of(0, &[-0f32; 5])]).unwrap().value().to_bits(), 0);
}

/// F10: twenty runs over ten million elements.
#[test]
fn twenty_runs() {
    let x = gradients(10_000_000, 20);
    let first = ChunkSums::of(0, &x);
    assert!((0..20).all(|_| bits(ChunkSums::of(0, &x).sums()) == bits(first.sums())));
}

#[test]
fn clip() {
    let norm = |x: &[f32]| GradientNorm::gather([&ChunkSums::of(0, x)]).unwrap();
    let clip = Clip::new(1.0).unwrap();
    let factor = |clip: Clip, x: &[f32], scale| match clip.coefficient(norm(x), scale) {
        Ok(Clipped::Factor(factor)) => factor,
        other => panic!("{other:?}"),
    };
    // By PyTorch's formula: 1/(10 + 1e-6), and no clipping below the norm.
    assert_eq!(factor(clip, &[6.0, 8.0], 1.0), (1.0 / (10.0 + 1e-6)) as f32);
    assert_eq!(factor(clip, &[0.6, 0.7], 1.0), 1.0);
    assert_eq!(factor(clip, &[0.0], 1.0), 1.0);
    // A norm of exactly max_norm shrinks by eps.
    assert_eq!(factor(clip, &[1.0], 1.0), 0.999_999);
    assert_eq!(factor(clip.eps(1e-3).unwrap(), &[1.0], 1.0), (1.0 / 1.001) as f32);
    // Gradients that carry a loss scale of 1024, or are climbed.
    assert_eq!(factor(clip, &[6.0 * 1024.0, 8.0 * 1024.0], 1.0 / 1024.0), (1.0 / (10.0 + 1e-6)) as f32);
    assert_eq!(factor(clip, &[6.0, 8.0], -1.0), (1.0 / (10.0 + 1e-6)) as f32);
    assert_eq!(factor(Clip::new(0.0).unwrap(), &[3.0], 1.0), 0.0);

    assert_eq!(factor(clip, &[f32::INFINITY, 1.0], 1.0), 0.0);
    assert!(factor(clip, &[f32::NAN, 1.0], 1.0).is_nan());
    let skip = clip.non_finite(NonFinite::Skip);
    assert_eq!(skip.coefficient(norm(&[f32::NAN]), 1.0), Ok(Clipped::Skip));
    assert_eq!(skip.coefficient(norm(&[1e-3]), 1.0), Ok(Clipped::Factor(1.0)));
    let refuse = clip.non_finite(NonFinite::Refuse);
    let error = refuse.coefficient(norm(&[f32::INFINITY]), 1.0).unwrap_err();
    assert_eq!(error.to_string(), "gradients: expected a finite norm, got inf");

    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(Clip::new(bad), Err(NormError::Range { argument: "max_norm", .. })));
        assert!(matches!(clip.eps(bad), Err(NormError::Range { argument: "eps", .. })));
    }
    assert!(clip.eps(0.0).is_err());
}
