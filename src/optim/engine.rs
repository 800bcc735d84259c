//! One step of one tensor: reads everything once, steps each element, rounds and stores everything once; over threads, at any
//! instruction-set level.

use core::array::from_fn;
use core::ops::AddAssign;

use half::bf16;

use super::hyper::{MOST, Rule};
use super::norm::{LANES, canonical, pairs};
use super::state::{Real, Store};
use super::store::{Drawer, MomentMut, Noise};
use super::{Shard, StepReport, remainder};
use crate::isa::{Isa, Kernel, at_level};
use crate::random::{BLOCK, Role};
use crate::round::lanes::{Decide, Draws16, NearestEven};
use crate::threads::join;

/// Elements that a thread takes at a time: whole blocks of every state format, and whole chunks of a norm.
const CHUNK: usize = 32 * BLOCK;

/// The memory of one tensor, or of a run of it.
pub(super) struct Memory<'a, P, G> {
    pub(super) p: &'a mut [P],
    /// The low halves of parameters, where they are kept.
    pub(super) rest: Option<&'a mut [u16]>,
    pub(super) g: &'a [G],
    /// Those of the rule; empty ones follow.
    pub(super) states: [MomentMut<'a>; MOST],
}

/// A state that there is not.
pub(super) fn no_state<'a>() -> MomentMut<'a> {
    MomentMut::F32(&mut [])
}

impl<P, G> Memory<'_, P, G> {
    /// Cuts after so many elements, a multiple of [`BLOCK`].
    fn split<R: Rule>(self, elements: usize) -> (Self, Self) {
        let (p, more_p) = self.p.split_at_mut(elements);
        let (g, more_g) = self.g.split_at(elements);
        let (rest, more_rest) = self.rest.map(|rest| rest.split_at_mut(elements)).unzip();
        let mut more_states = from_fn(|_| no_state());
        let mut s = 0;
        let states = self.states.map(|state| {
            let (state, more) = if s < R::STATES.len() { state.split(elements) } else { (state, no_state()) };
            more_states[s] = more;
            s += 1;
            state
        });
        (Self { p, rest, g, states }, Self { p: more_p, rest: more_rest, g: more_g, states: more_states })
    }
}

/// What a meter counts in one state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Elements with a value before and after, and a gradient now or before.
    pub(crate) counted: u64,
    pub(crate) stalled: u64,
    pub(crate) nan: u64,
    pub(crate) untouched: u64,
    /// Elements that moved to the code that is nearest to the old value.
    pub(crate) moved_to_same: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.counted += other.counted;
        self.stalled += other.stalled;
        self.nan += other.nan;
        self.untouched += other.untouched;
        self.moved_to_same += other.moved_to_same;
    }
}

/// What comes of a run of elements, besides the step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) report: StepReport,
    pub(super) counts: [Counts; MOST],
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.report += other.report;
        for (counts, more) in self.counts.iter_mut().zip(other.counts) {
            *counts += more;
        }
    }
}

/// One step of one tensor.
pub(super) struct Step<'a, R: Rule> {
    pub(super) isa: Isa,
    pub(super) scalars: &'a R::Scalars,
    /// Of parameters, and of each state.
    pub(super) noise: &'a [Noise; 1 + MOST],
    pub(super) skip_zeros: bool,
    pub(super) meter: bool,
}

/// The state by which an element is known to have had a gradient: the second moment, or the only one.
const fn witness<R: Rule>() -> usize {
    let mut s = 0;
    while s < R::STATES.len() {
        if matches!(R::STATES[s].role, Role::SecondMoment) {
            return s;
        }
        s += 1;
    }
    0
}

impl<R: Rule> Step<'_, R> {
    /// Halves the work until it is one chunk. `first` is the index of the first element.
    pub(super) fn spread<P: Real, G: Real>(&self, first: u64, memory: Memory<'_, P, G>) -> Tally {
        let n = memory.p.len();
        if n <= CHUNK {
            return self.chunk(first, memory);
        }
        let middle = n.div_ceil(CHUNK) / 2 * CHUNK;
        let (head, tail) = memory.split::<R>(middle);
        let (mut tally, more) = join(|| self.spread(first, head), || self.spread(first + middle as u64, tail));
        tally += more;
        tally
    }

    fn chunk<P: Real, G: Real>(&self, first: u64, memory: Memory<'_, P, G>) -> Tally {
        let whole = memory.states[..R::STATES.len()].iter().all(|state| matches!(state, MomentMut::Bf16(_)));
        let [draws_p, draws @ ..] = &mut self.noise.each_ref().map(Drawer::new);
        let mut tally = Tally::default();
        if whole && moves_bits::<P>() && moves_bits::<G>() && memory.rest.is_none() && !self.skip_zeros {
            self.chunk_in_one(first, memory, (draws_p, draws), &mut tally);
        } else {
            self.chunk_in_rooms(first, memory, (draws_p, draws), &mut tally);
        }
        tally
    }

    fn chunk_in_one<P: Real, G: Real>(
        &self,
        first: u64,
        memory: Memory<'_, P, G>,
        (draws_p, draws): (&mut Drawer, &mut [Drawer; MOST]),
        tally: &mut Tally,
    ) {
        let Memory { p, g, mut states, .. } = memory;
        for (b, (p, g)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
            let (at, n) = (b * BLOCK, p.len());
            let states = states.each_mut().map(|state| match state {
                MomentMut::Bf16(x) => &mut x[at..at + n],
                _ => &mut [],
            });
            let draws = (&mut *draws_p, &mut *draws);
            let work = InOne::<R, P, G> { scalars: self.scalars, index: first + at as u64, p, g, states, draws };
            let counts = if self.meter { at_level(self.isa, Metered(work)) } else { at_level(self.isa, work) };
            add(&mut tally.counts[..R::STATES.len()], n, &counts);
        }
    }

    fn chunk_in_rooms<P: Real, G: Real>(
        &self,
        first: u64,
        memory: Memory<'_, P, G>,
        (draws_p, draws): (&mut Drawer, &mut [Drawer; MOST]),
        tally: &mut Tally,
    ) {
        let Memory { p, mut rest, g, mut states } = memory;
        let [mut olds, mut news] = [[[0f32; BLOCK]; MOST]; 2];
        let mut rooms = Rooms { p: [0; BLOCK], g: [0; BLOCK], new_p: [0.0; BLOCK] };
        for (b, (p, g)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
            let (at, n) = (b * BLOCK, p.len());
            let index = first + at as u64;
            let rest = rest.as_deref_mut().map(|rest| &mut rest[at..at + n]);
            let mut meter = {
                let mut pieces: [_; MOST] = from_fn(|_| no_state());
                for ((piece, state), _) in pieces.iter_mut().zip(&mut states).zip(R::STATES) {
                    *piece = state.piece(at..at + n);
                }
                let mut old: [&[f32]; MOST] = [&[]; MOST];
                for (((old, piece), room), _) in old.iter_mut().zip(&pieces).zip(&mut olds).zip(R::STATES) {
                    *old = piece.values(self.isa, room);
                }
                let new = news.each_mut().map(|room| &mut room[..n]);
                let apply =
                    Apply::<R, P, G> { step: self, index, p, rest, g, old, new, draws: draws_p, rooms: &mut rooms };
                at_level(self.isa, apply);
                Meter::new::<R, G>(self.meter, g, old)
            };
            for (s, (state, draws)) in states.iter_mut().zip(&mut *draws).enumerate().take(R::STATES.len()) {
                meter.before(self.isa, &state.piece(at..at + n));
                let piece = state.piece(at..at + n);
                tally.report.nan_blocks += piece.store(self.isa, draws, index, &news[s][..n]);
                meter.after(self.isa, &state.piece(at..at + n), &mut tally.counts[s]);
            }
        }
    }

    /// The sums of squares of parameters and update, a chunk at a time: the lanes and the tree of a norm.
    pub(super) fn norms<P: Real, G: Real>(&self, memory: Memory<'_, P, G>, sums: [&mut [f64]; 2]) {
        let n = memory.p.len();
        if n <= CHUNK {
            return self.norms_of_chunk(memory, sums);
        }
        let middle = n.div_ceil(CHUNK) / 2 * CHUNK;
        let (head, tail) = memory.split::<R>(middle);
        let [p, u] = sums.map(|sums| sums.split_at_mut(middle / Shard::CUT as usize));
        join(|| self.norms(head, [p.0, u.0]), || self.norms(tail, [p.1, u.1]));
    }

    fn norms_of_chunk<P: Real, G: Real>(&self, memory: Memory<'_, P, G>, [sums_p, sums_u]: [&mut [f64]; 2]) {
        let Memory { p, rest, g, mut states } = memory;
        let (n, cut) = (p.len(), Shard::CUT as usize);
        let mut olds = [[0f32; BLOCK]; MOST];
        let mut rooms = Rooms { p: [0; BLOCK], g: [0; BLOCK], new_p: [0.0; BLOCK] };
        for (chunk, (sum_p, sum_u)) in sums_p.iter_mut().zip(sums_u).enumerate() {
            let mut lanes = [[0f64; LANES]; 2];
            for at in (chunk * cut..n.min((chunk + 1) * cut)).step_by(BLOCK) {
                let run = at..n.min(at + BLOCK);
                let mut pieces: [_; MOST] = from_fn(|_| no_state());
                for ((piece, state), _) in pieces.iter_mut().zip(&mut states).zip(R::STATES) {
                    *piece = state.piece(run.clone());
                }
                let mut old: [&[f32]; MOST] = [&[]; MOST];
                for (((old, piece), room), _) in old.iter_mut().zip(&pieces).zip(&mut olds).zip(R::STATES) {
                    *old = piece.values(self.isa, room);
                }
                let rest = rest.as_deref().map(|rest| &rest[run.clone()]);
                let (p, g) = (&p[run.clone()], &g[run]);
                let squares = Squares::<R, P, G> { step: self, p, rest, g, old, rooms: &mut rooms, lanes: &mut lanes };
                at_level(self.isa, squares);
            }
            [*sum_p, *sum_u] = lanes.each_mut().map(|lanes| canonical(pairs(lanes)));
        }
    }
}

/// Whether numbers of a type are f32 but for a move of bits.
fn moves_bits<T: Real>() -> bool {
    T::zeroed().widen().is_some()
}

/// Counts of a run of up to [`BLOCK`] elements: stalled and NaN of each state, and untouched elements.
#[derive(Default)]
struct Few {
    untouched: u32,
    nan: [u32; MOST],
    stalled: [u32; MOST],
}

impl Few {
    /// One element: its gradient, and each state before and after.
    #[inline(always)]
    fn see<R: Rule>(&mut self, g: f32, old: [f32; MOST], new: [f32; MOST]) {
        let untouched = (g == 0.0) & (old[witness::<R>()] == 0.0);
        self.untouched += u32::from(untouched);
        for s in 0..R::STATES.len() {
            self.nan[s] += u32::from(!untouched & (old[s].is_nan() | new[s].is_nan()));
            self.stalled[s] += u32::from(!untouched & (old[s] == new[s]));
        }
    }
}

/// Adds the counts of a run, if there are any.
fn add(counts: &mut [Counts], n: usize, few: &Option<Few>) {
    let Some(Few { untouched, nan, stalled }) = few else { return };
    for (s, counts) in counts.iter_mut().enumerate() {
        let (untouched, nan) = (u64::from(*untouched), u64::from(nan[s]));
        let counted = n as u64 - untouched - nan;
        *counts += Counts { counted, stalled: stalled[s].into(), nan, untouched, moved_to_same: 0 };
    }
}

/// A step of up to [`BLOCK`] elements in one loop, in which divisions and memory overlap: for states in BF16, and parameters and
/// gradients that are f32 but for a move of bits.
struct InOne<'a, R: Rule, P, G> {
    scalars: &'a R::Scalars,
    index: u64,
    p: &'a mut [P],
    g: &'a [G],
    states: [&'a mut [bf16]; MOST],
    draws: (&'a mut Drawer, &'a mut [Drawer; MOST]),
}

impl<R: Rule, P: Real, G: Real> Kernel for InOne<'_, R, P, G> {
    type Output = Option<Few>;
    #[inline(always)]
    fn run(self) -> Option<Few> {
        self.go::<false>();
        None
    }
}

/// The same with a meter.
struct Metered<'a, R: Rule, P, G>(InOne<'a, R, P, G>);

impl<R: Rule, P: Real, G: Real> Kernel for Metered<'_, R, P, G> {
    type Output = Option<Few>;
    #[inline(always)]
    fn run(self) -> Option<Few> {
        Some(self.0.go::<true>())
    }
}

impl<R: Rule, P: Real, G: Real> InOne<'_, R, P, G> {
    #[inline(always)]
    fn go<const METER: bool>(self) -> Few {
        let Self { scalars, index, p, g, states, draws: (of_p, [of_a, of_b, of_c]) } = self;
        let (n, none) = (p.len(), &[(); BLOCK][..p.len()]);
        let of_p = if size_of::<P>() < 4 { of_p.draws(index, n) } else { None };
        let count = R::STATES.len();
        let of_a = of_a.draws(index, n);
        let of_b = if count > 1 { of_b.draws(index, n) } else { None };
        let of_c = if count > 2 { of_c.draws(index, n) } else { None };
        // All states are drawn for, or none.
        let of_states = of_a.map(|of_a| [of_a, of_b.unwrap_or(&[]), of_c.unwrap_or(&[])]);
        match (of_p, of_states) {
            (None, None) => {
                in_one::<R, P, G, NearestEven, NearestEven, METER>(scalars, g, p, states, none, [none; MOST])
            }
            (Some(of_p), None) => {
                in_one::<R, P, G, Draws16, NearestEven, METER>(scalars, g, p, states, of_p, [none; MOST])
            }
            (None, Some(of_states)) => {
                in_one::<R, P, G, NearestEven, Draws16, METER>(scalars, g, p, states, none, of_states)
            }
            (Some(of_p), Some(of_states)) => {
                in_one::<R, P, G, Draws16, Draws16, METER>(scalars, g, p, states, of_p, of_states)
            }
        }
    }
}

#[inline(always)]
fn in_one<R: Rule, P: Real, G: Real, OfP: Decide, OfS: Decide, const METER: bool>(
    scalars: &R::Scalars,
    g: &[G],
    p: &mut [P],
    [a, b, c]: [&mut [bf16]; MOST],
    of_p: &[OfP::Draw],
    [of_a, of_b, of_c]: [&[OfS::Draw]; MOST],
) -> Few {
    three::<R, P, G, OfP, OfS, METER>(scalars, g, p, a, b, c, of_p, of_a, of_b, of_c)
}

/// A function of its own for its arguments, of which the compiler then knows that none overlaps another.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "each is memory of its own")]
fn three<R: Rule, P: Real, G: Real, OfP: Decide, OfS: Decide, const METER: bool>(
    scalars: &R::Scalars,
    g: &[G],
    p: &mut [P],
    a: &mut [bf16],
    b: &mut [bf16],
    c: &mut [bf16],
    of_p: &[OfP::Draw],
    of_a: &[OfS::Draw],
    of_b: &[OfS::Draw],
    of_c: &[OfS::Draw],
) -> Few {
    let (scalars, n, target, count) = (*scalars, p.len(), P::target(), R::STATES.len());
    // Slices of states that there are not are empty and stay so.
    let length = |s: usize| if s < count { n } else { 0 };
    let (g, of_p) = (&g[..n], &of_p[..n]);
    let (a, b, c) = (&mut a[..n], &mut b[..length(1)], &mut c[..length(2)]);
    let (of_a, of_b, of_c) = (&of_a[..n], &of_b[..length(1)], &of_c[..length(2)]);
    let mut few = Few::default();
    let wide = |x: bf16| x.widen().unwrap_or_default();
    for i in 0..n {
        let mut old = [wide(a[i]), 0.0, 0.0];
        if count > 1 {
            old[1] = wide(b[i]);
        }
        if count > 2 {
            old[2] = wide(c[i]);
        }
        let [old_p, grad] = [p[i].widen(), g[i].widen()].map(Option::unwrap_or_default);
        let (new_p, new) = R::step(&scalars, old_p, grad, old);
        p[i] = P::store::<OfP>(&target, new_p, of_p[i]);
        let mut stored = [0.0; MOST];
        a[i] = bf16::store::<OfS>(&(), new[0], of_a[i]);
        stored[0] = wide(a[i]);
        if count > 1 {
            b[i] = bf16::store::<OfS>(&(), new[1], of_b[i]);
            stored[1] = wide(b[i]);
        }
        if count > 2 {
            c[i] = bf16::store::<OfS>(&(), new[2], of_c[i]);
            stored[2] = wide(c[i]);
        }
        if METER {
            few.see::<R>(grad, old, stored);
        }
    }
    few
}

/// The element rule over up to [`BLOCK`] elements: stores parameters, leaves states unrounded.
struct Apply<'a, R: Rule, P, G> {
    step: &'a Step<'a, R>,
    index: u64,
    p: &'a mut [P],
    rest: Option<&'a mut [u16]>,
    g: &'a [G],
    old: [&'a [f32]; MOST],
    new: [&'a mut [f32]; MOST],
    draws: &'a mut Drawer,
    rooms: &'a mut Rooms,
}

/// Parameters and gradients as f32 bits, where they are not already, and new parameters or updates.
struct Rooms {
    p: [u32; BLOCK],
    g: [u32; BLOCK],
    new_p: [f32; BLOCK],
}

/// Parameters as f32 bits: with the low halves, where they are kept.
#[inline(always)]
fn words<'a, P: Real>(p: &'a [P], rest: Option<&[u16]>, room: &'a mut [u32; BLOCK]) -> &'a [u32] {
    let Some(rest) = rest else { return P::words(p, room) };
    for ((word, &number), &rest) in room.iter_mut().zip(bytemuck::cast_slice::<P, bf16>(p)).zip(rest) {
        *word = remainder::join(number, rest).to_bits();
    }
    room
}

impl<R: Rule, P: Real, G: Real> Kernel for Apply<'_, R, P, G> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { step, index, p, rest, g, old, new, draws, rooms } = self;
        let n = p.len();
        let (words_p, words_g) = (&words(p, rest.as_deref(), &mut rooms.p)[..n], &G::words(g, &mut rooms.g)[..n]);
        let ([a, b, c], [new_a, new_b, new_c], new_p) = (old, new, &mut rooms.new_p[..n]);
        apply::<R>(step.scalars, step.skip_zeros, [words_p, words_g], [a, b, c], new_p, new_a, new_b, new_c);
        match rest {
            None => draws.write(index, new_p, p),
            Some(rest) => {
                let numbers = bytemuck::cast_slice_mut::<P, bf16>(p);
                for ((number, rest), &x) in numbers.iter_mut().zip(rest).zip(&*new_p) {
                    let canonical = <f32 as Store>::store::<NearestEven>(&(), x, ());
                    (*number, *rest) = remainder::split(canonical);
                }
            }
        }
    }
}

/// A function of its own for its arguments, of which the compiler then knows that none overlaps another.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "each is memory of its own")]
fn apply<R: Rule>(
    scalars: &R::Scalars,
    skip_zeros: bool,
    [p, g]: [&[u32]; 2],
    [a, b, c]: [&[f32]; MOST],
    new_p: &mut [f32],
    new_a: &mut [f32],
    new_b: &mut [f32],
    new_c: &mut [f32],
) {
    let (scalars, n, count) = (*scalars, new_p.len(), R::STATES.len());
    let length = |s: usize| if s < count { n } else { 0 };
    let (p, g) = (&p[..n], &g[..n]);
    let (a, b, c) = (&a[..n], &b[..length(1)], &c[..length(2)]);
    let (new_a, new_b, new_c) = (&mut new_a[..n], &mut new_b[..length(1)], &mut new_c[..length(2)]);
    for i in 0..n {
        let [p, g] = [p[i], g[i]].map(f32::from_bits);
        let mut old = [a[i], 0.0, 0.0];
        if count > 1 {
            old[1] = b[i];
        }
        if count > 2 {
            old[2] = c[i];
        }
        let (stepped, new) = R::step(&scalars, p, g, old);
        let still = skip_zeros & (g == 0.0);
        new_p[i] = if still { p } else { stepped };
        new_a[i] = if still { old[0] } else { new[0] };
        if count > 1 {
            new_b[i] = if still { old[1] } else { new[1] };
        }
        if count > 2 {
            new_c[i] = if still { old[2] } else { new[2] };
        }
    }
}

/// Adds the squares of up to [`BLOCK`] parameters and of their updates to the lanes of a norm.
struct Squares<'a, R: Rule, P, G> {
    step: &'a Step<'a, R>,
    p: &'a [P],
    rest: Option<&'a [u16]>,
    g: &'a [G],
    old: [&'a [f32]; MOST],
    rooms: &'a mut Rooms,
    lanes: &'a mut [[f64; LANES]; 2],
}

impl<R: Rule, P: Real, G: Real> Kernel for Squares<'_, R, P, G> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { step, p, rest, g, old: [a, b, c], rooms, lanes: [lanes_p, lanes_u] } = self;
        let (n, count) = (p.len(), R::STATES.len());
        let (words_p, words_g) = (&words(p, rest, &mut rooms.p)[..n], &G::words(g, &mut rooms.g)[..n]);
        for i in 0..n {
            let [p, g] = [words_p[i], words_g[i]].map(f32::from_bits);
            let old = [a[i], if count > 1 { b[i] } else { 0.0 }, if count > 2 { c[i] } else { 0.0 }];
            let u = R::update(step.scalars, p, g, old);
            let u = f64::from(if step.skip_zeros & (g == 0.0) { 0.0 } else { u });
            // Squares are exact, so that a fused operation gives the same.
            lanes_p[i] += f64::from(p) * f64::from(p);
            lanes_u[i] += u * u;
        }
    }
}

/// Counts who stalled in the states of up to [`BLOCK`] elements.
struct Meter {
    on: bool,
    n: usize,
    untouched: [bool; BLOCK],
    old: [f32; BLOCK],
    scales: [f32; BLOCK / 32],
}

impl Meter {
    fn new<R: Rule, G: Real>(on: bool, g: &[G], old: [&[f32]; MOST]) -> Self {
        let n = g.len();
        let mut meter = Self { on, n, untouched: [false; BLOCK], old: [0.0; BLOCK], scales: [0.0; BLOCK / 32] };
        if on {
            let mut room = [0; BLOCK];
            let words = G::words(g, &mut room);
            for ((untouched, &g), &old) in meter.untouched.iter_mut().zip(words).zip(old[witness::<R>()]) {
                *untouched = (f32::from_bits(g) == 0.0) & (old == 0.0);
            }
        }
        meter
    }

    /// Takes down a state that is about to be stored.
    fn before(&mut self, isa: Isa, piece: &MomentMut<'_>) {
        if self.on {
            let mut room = [0.0; BLOCK];
            let old = piece.values(isa, &mut room);
            self.old[..old.len()].copy_from_slice(old);
            piece.scales(&mut self.scales);
        }
    }

    /// Compares it with what was stored.
    fn after(&self, isa: Isa, piece: &MomentMut<'_>, counts: &mut Counts) {
        if !self.on {
            return;
        }
        let mut room = [0.0; BLOCK];
        let new = piece.values(isa, &mut room);
        let (mut untouched, mut nan, mut stalled) = (0u64, 0u64, 0u64);
        for ((&still, &old), &new) in self.untouched.iter().zip(&self.old).zip(new) {
            untouched += u64::from(still);
            nan += u64::from(!still & (old.is_nan() | new.is_nan()));
            stalled += u64::from(!still & (old == new));
        }
        let moved_to_same = piece.moved_to_same(&self.scales, &self.old, new, &self.untouched);
        *counts += Counts { counted: self.n as u64 - untouched - nan, stalled, nan, untouched, moved_to_same };
    }
}
