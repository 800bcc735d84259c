//! The streams against their vectors and against themselves.

use halfulp::Draw;
use halfulp::random::{Draws, Keys, Role, SrStates, Stream, philox4x32_10, sr_states_hash, tensor_id};

const MLP: &str = "model.layers.0.mlp.up_proj.weight";

#[test]
fn v1_vectors() {
    let rows = include_str!("golden/stream1.tsv").lines().skip(2);
    let mut read = 0;
    for row in rows {
        let mut columns = row.split('\t');
        let [seed, step, tensor, role, group] =
            std::array::from_fn(|_| columns.next().unwrap().parse::<u64>().unwrap());
        let [x0, x1] = std::array::from_fn(|_| u64::from_str_radix(columns.next().unwrap(), 16).unwrap());
        let word = Keys::new(seed, step, tensor, role as u32, (group >> 32) as u32).word(group as u32);
        assert_eq!(word, x0 | x1 << 32, "{row}");
        read += 1;
    }
    assert_eq!(read, 9);
    let keys = [0x9C10_2C8E, 0x8C00_E7E7, 0x5F03_FDD7, 0x70C8_09A9, 0xD1D0_067A];
    assert_eq!(Keys::new(42, 1, 3, 2, 0).words(), keys);
    assert_eq!(tensor_id(MLP), 0xBB99_F1CA_D1E2_6788);
}

#[test]
fn v1_draws() {
    let draw = Draw::seeded(42).step(1).tensor(3);
    let m = draw.role(Role::FirstMoment);
    let expected = [0xA9D0, 0x3BB0, 0xB27A, 0x49F9, 0x6116, 0xCF88, 0x1DFC, 0x91D2];
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(|i| m.draw16(i)), expected);
    assert_eq!(m.draw16(768), 0xCAA7);
    assert_eq!([0, 1, 2, 3].map(|i| draw.draw32(i)), [0xB578_6514, 0xE9E4_565A, 0x2CF4_0B1A, 0x0A89_C3EB]);
}

/// Word 0 of seed 42, step 1, tensor 3, casts.
const PHILOX_STREAM: u32 = 0xA576_2A29;

/// The stream of that name is frozen too: its keys, its order of words.
#[test]
fn philox_stream() {
    let draw = Draw::seeded(42).step(1).tensor(3).stream(Stream::Philox);
    let key = philox4x32_10([3, 0, 32, 1], [42, 0]);
    let words = |block| philox4x32_10([block, 0, 1, 0], [key[0], key[1]]);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|i| draw.draw32(i))[..], [words(0).to_vec(), words(1)[..2].to_vec()].concat());
    let key = philox4x32_10([3, 0, 2, 1], [42, 0]);
    let m = draw.role(Role::FirstMoment);
    for i in 0..16u64 {
        let word = philox4x32_10([(i / 8) as u32, 0, 1, 0], [key[0], key[1]])[(i / 2 % 4) as usize];
        assert_eq!(m.draw16(i), (word >> (16 * (i % 2))) as u16);
    }
    assert_eq!(draw.draw32(0), PHILOX_STREAM);
}

#[test]
fn philox_vectors() {
    const M: u32 = u32::MAX;
    assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
    assert_eq!(philox4x32_10([M; 4], [M; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
    let pi = philox4x32_10([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]);
    assert_eq!(pi, [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]);
}

#[test]
fn sr_states_vectors() {
    for (counter, x) in [
        (0, 0),
        (1, 0x6889_90C0),
        (2, 0xD113_2181),
        (7, 0x948B_A1E6),
        (65_535, 0x33CA_D8BA),
        (123_456_789, 0xA8F1_DB88),
        (u32::MAX, 0x6768_824A),
    ] {
        assert_eq!(sr_states_hash(counter), x);
        assert_eq!(SrStates::seeded(counter.into()).draw16(0), x as u16);
        assert_eq!(SrStates::seeded(0).advanced(counter.into()).draw32(0), x);
        assert_eq!(SrStates::seeded(u64::MAX).draw32(u64::from(counter) + 1), x);
    }
}

fn fills(draw: impl Draws) {
    for first in [0, 1, 2, 3, 4, 5, 6, 7, 1000, (1 << 34) - 700, (1 << 33) - 700, u64::MAX - 650] {
        let (mut a, mut b) = (vec![0; 1500], vec![0; 1500]);
        draw.fill16(first, &mut a);
        draw.fill32(first, &mut b);
        for (j, (a, b)) in (0..).zip(a.into_iter().zip(b)) {
            let i = first.wrapping_add(j);
            assert_eq!(a, draw.draw16(i), "16-bit draw {i} of a fill from {first}");
            assert_eq!(b, draw.draw32(i), "32-bit draw {i} of a fill from {first}");
        }
    }
}

/// Runs of draws are the single draws, at every alignment, over the boundaries of 2^32 groups and of 2^64 elements.
#[test]
fn fills_are_single_draws() {
    for stream in [Stream::V1, Stream::Philox] {
        let draw = Draw::seeded(9).step(8).tensor(7).stream(stream);
        fills(draw);
        fills(draw.at(3));
        fills(draw.at(u64::MAX - 100));
    }
    fills(SrStates::seeded(3));
}

#[test]
fn draws_at_are_draws_from() {
    for stream in [Stream::V1, Stream::Philox] {
        let draw = Draw::seeded(1).stream(stream);
        for i in [0, 1, 5, 1 << 40] {
            assert_eq!(draw.at(i).draw16(7), draw.draw16(i + 7));
            assert_eq!(draw.at(i).draw32(7), draw.draw32(i + 7));
        }
    }
}
