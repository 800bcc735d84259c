//! What a step over many tensors launches: kernels by types and formats, and the tables that they go by.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::DeviceRepr;

use super::blocks::Wide;
use super::launch::{Piece, pieces};
use super::{CudaError, ElementType};
use crate::format::{BlockFormat, BlockScale, Format};
use crate::optim::{MOST, Rounding, StateFormat, StateKind};
use crate::random::Role;
use crate::round::Overflow;
use crate::round::lanes::Target32;

/// Hyper-parameters of a parameter group: `HYPER` of many.cuh.
pub(super) const HYPER: usize = 12;

/// Flags of an item.
const VECTOR: u32 = 1;
const LEADS: u32 = 2;
const ALONE: u32 = 4;

/// `Item` of many.cuh.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Item {
    n: u64,
    p: u64,
    g: u64,
    rest: u64,
    states: [u64; MOST],
    scales: [u64; MOST],
    id: u64,
    group: u32,
    high: u32,
    /// As in many.cuh.
    flags: u32,
    slot: u32,
    tiles: u32,
    hyper: u32,
    chunk: u32,
    tile: u32,
    norm_tile: u32,
    unused: u32,
}

/// `Record` of many.cuh.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Record([u32; 64]);

/// `Clock` of many.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Clock {
    pub(super) step: u64,
    pub(super) skipped: u64,
    pub(super) seed_parameters: u64,
    pub(super) seed_states: u64,
    pub(super) gradient_scale: f32,
    pub(super) clip: f32,
    pub(super) found_inf: u32,
    /// Blocks that have prepared their part of a step.
    pub(super) arrived: u32,
}

/// Copies of counts: `COPIES` of many.cuh.
pub(super) const COPIES: usize = 32;

/// `Counts` of many.cuh.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct DeviceCounts {
    pub(super) untouched: u64,
    pub(super) stalled: [u64; MOST],
    pub(super) nan: [u64; MOST],
    pub(super) moved_to_same: [u64; MOST],
}

/// `Launch` of many.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ManyArguments {
    pub(super) places: u64,
    pub(super) items: u64,
    pub(super) records: u64,
    pub(super) counts: u64,
    pub(super) count: u32,
    pub(super) place_shift: u32,
    pub(super) p_draws: u16,
    pub(super) s_draws: u16,
    pub(super) ahead: u32,
    pub(super) direct: Direct,
}

/// Parameter groups whose scalars a launch is told: `MOST_GROUPS` of many.cuh.
pub(super) const MOST_GROUPS: usize = 8;

/// What a launch is told when nothing prepares it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Direct {
    /// 1: the record of one item, 2: what the records of several are made of, 3: that, but for keys, which an earlier step made.
    pub(super) on: u32,
    /// Whether roots and quotients may be refined from the device's approximations.
    pub(super) seeded: u32,
    pub(super) record: Record,
    pub(super) scalars: [Scalars; MOST_GROUPS],
    pub(super) seed_parameters: u64,
    pub(super) seed_states: u64,
    pub(super) clock: u64,
    pub(super) ages: u64,
    pub(super) step: u64,
    /// How many states have ages.
    pub(super) states: u32,
    pub(super) unused: u32,
    /// Where keys are made ahead, and for which step; 0: nowhere.
    pub(super) next_records: u64,
    pub(super) next_step: u64,
}

/// Words of the scalars of a rule, and in the last one whether zeros are skipped.
pub(super) type Scalars = [u32; 16];

impl Direct {
    pub(super) const OFF: Self = Self {
        on: 0,
        seeded: 0,
        record: Record([0; 64]),
        scalars: [[0; 16]; MOST_GROUPS],
        seed_parameters: 0,
        seed_states: 0,
        clock: 0,
        ages: 0,
        step: 0,
        states: 0,
        unused: 0,
        next_records: 0,
        next_step: 0,
    };
}

/// Scalars as kernels read them.
pub(super) fn scalars<S: Copy>(scalars: &S, skip_zeros: bool) -> Scalars {
    let mut words = [0u32; 16];
    assert!(size_of::<S>() < size_of_val(&words));
    // SAFETY: scalars are `repr(C)` structs of f32 and u32, no longer than the room.
    unsafe { core::ptr::from_ref(scalars).cast::<u8>().copy_to(words.as_mut_ptr().cast(), size_of::<S>()) };
    words[15] = skip_zeros.into();
    words
}

impl Record {
    /// Of one item in one step: keys of parameters and states, and scalars.
    pub(super) fn new(keys: [[u32; 5]; 1 + MOST], scalars: &Scalars) -> Self {
        let mut words = [0u32; 64];
        for (to, keys) in words.chunks_exact_mut(8).zip(&keys) {
            to[..5].copy_from_slice(keys);
        }
        words[32..48].copy_from_slice(scalars);
        words[49] = scalars[15];
        Self(words)
    }
}

/// `AnyLaunch` of any.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AnyArguments {
    pub(super) launch: ManyArguments,
    pub(super) p_type: u32,
    pub(super) g_type: u32,
    pub(super) log_run: u32,
    pub(super) tiles: u32,
    pub(super) states: [MomentArguments; MOST],
}

/// How a state is stored: `Moment` of blocks.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct MomentArguments {
    /// 0: f32, 1: BF16, 2: blocks under powers of two, 3: blocks under f32 scales. The rest is for blocks alone.
    pub(super) kind: u32,
    pub(super) fraction_bits: u32,
    pub(super) bias: i32,
    /// The smallest code of what is above zero.
    pub(super) floor: u32,
    pub(super) log_block: u32,
    pub(super) target: Target32<false>,
    /// The largest value of an element.
    pub(super) max: f64,
    pub(super) wide: Wide,
}

/// `Norms` of step.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct NormsArguments {
    pub(super) launch: ManyArguments,
    pub(super) sums: u64,
    pub(super) chunks: u64,
}

/// `AnyNorms` of any.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AnyNormsArguments {
    pub(super) launch: AnyArguments,
    pub(super) sums: u64,
    pub(super) chunks: u64,
}

/// `AskSeeds` of prepare.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AskSeedsArguments {
    pub(super) failed: u64,
}

/// `Trust` of prepare.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct TrustArguments {
    pub(super) items: u64,
    pub(super) records: u64,
    pub(super) hyper: u64,
    pub(super) sums: u64,
    pub(super) chunks: u64,
}

/// `Prepare` of prepare.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PrepareArguments {
    pub(super) items: u64,
    pub(super) records: u64,
    pub(super) ages: u64,
    pub(super) hyper: u64,
    pub(super) clock: u64,
    pub(super) norm: u64,
    pub(super) counts: u64,
    pub(super) count: u32,
    pub(super) skips: u32,
}

/// `SetControl` of prepare.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ControlArguments {
    pub(super) clock: u64,
    pub(super) gradient_scale: f32,
    pub(super) clip: f32,
    pub(super) found_inf: u32,
    pub(super) unused: u32,
}

/// `SetHyper` of prepare.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct HyperArguments {
    pub(super) hyper: u64,
    pub(super) values: [f64; HYPER],
}

// SAFETY: `repr(C)`, integers and floats alone, in the layout of the struct that each names.
unsafe impl DeviceRepr for ManyArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for AnyArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for NormsArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for AnyNormsArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for TrustArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for AskSeedsArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for PrepareArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for ControlArguments {}
// SAFETY: as above.
unsafe impl DeviceRepr for HyperArguments {}

/// One tensor of a step, all of it on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resident {
    pub(super) id: u64,
    /// Index of the first element.
    pub(super) first: u64,
    pub(super) n: u64,
    pub(super) p: u64,
    pub(super) p_type: ElementType,
    pub(super) g: u64,
    pub(super) g_type: ElementType,
    /// 0 without.
    pub(super) rest: u64,
    /// Addresses of the states, codes and then scales.
    pub(super) states: [u64; MOST],
    pub(super) formats: [StateFormat; MOST],
    /// Where its ages and counts are.
    pub(super) slot: u32,
    pub(super) hyper: u32,
    pub(super) skip_zeros: bool,
}

/// What decides on a kernel, beside types and formats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Name of the rule.
    pub(super) rule: &'static str,
    pub(super) kinds: &'static [StateKind],
    pub(super) parameters: Rounding,
    pub(super) states: Rounding,
    pub(super) meter: bool,
    /// Whether the rule goes by norms of whole tensors.
    pub(super) norms: bool,
}

/// Which arguments a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Takes {
    /// `Launch`: types, formats and rounding are in its name.
    Many,
    /// `AnyLaunch`.
    Any,
}

/// A kernel of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) module: &'static str,
    pub(super) name: String,
    pub(super) takes: Takes,
    /// Elements of a block of threads; or of a warp, if warps take tiles one after another.
    pub(super) tile: u64,
    /// If they do, blocks to a multiprocessor.
    blocks: Option<u32>,
    /// Tiles ahead, to two multiprocessors.
    ahead: u32,
    /// The kernel that takes the norms of the same memory, and its module.
    pub(super) norms: Option<(&'static str, String)>,
    /// What memory is aligned to where a kernel takes whole words, in elements of unscaled arrays; 0: in 16 bytes.
    align: u64,
    log_run: u32,
}

/// Elements of first and second moments that kernels of AdamW have built in.
const BUILT_IN: [&str; 4] = ["e4m3_ue4m4", "e4m3_e4m3", "e5m2_ue5m3", "e2m1_ue2m2nz"];

/// Threads of a block, and of a warp.
const THREADS: u64 = 128;
const WARP: u64 = 32;

/// The name of what is rounded, for a kernel's name.
fn rounded(name: &str, rounding: Rounding) -> String {
    match rounding {
        Rounding::Stochastic { .. } => format!("{name}s"),
        _ => format!("{name}n"),
    }
}

/// Tiles by which steps bring memory into the cache ahead of its use, to two multiprocessors: a quarter of those that are at work at
/// once, with 16-bit parameters half of them; none with moments in blocks, which it makes slower. On an H200 fewer are late, and many
/// more are gone again by when they are used.
const AHEAD: u32 = 4;
const AHEAD_OF_16_BITS: u32 = 9;

/// Blocks to a multiprocessor whose warps take tiles one after another, with codes of 4 bits and of 8. On an H200 four are at
/// work at once; what a warp does once is then little, and warps do not fall far behind each other. Tests have few, so that a warp takes
/// several of their tiles.
const BLOCKS: [u32; 2] = if cfg!(test) { [1, 3] } else { [40, 160] };

impl PlannedLaunch {
    /// Blocks of threads of a step.
    pub(super) fn blocks(&self, multiprocessors: u32) -> u32 {
        match self.kernel.blocks {
            Some(blocks) => self.tiles.div_ceil((THREADS / WARP) as u32).min(blocks * multiprocessors),
            None => self.tiles,
        }
    }

    /// Bytes of the plan's records before those of this launch.
    pub(super) fn records_at(&self) -> u64 {
        (size_of::<Record>() * self.items.start) as u64
    }

    /// Tiles ahead of a step, and chunks ahead of its norms. Kernels whose time is not that of memory do not look ahead.
    pub(super) fn ahead(&self, multiprocessors: u32) -> [u32; 2] {
        let tiles = self.kernel.ahead * multiprocessors / 2;
        [tiles, (u64::from(tiles) * self.kernel.tile / CHUNK) as u32]
    }
}

impl Kernel {
    /// log2 of the elements that a warp takes at a time, by those that take any format.
    pub(super) fn log_run(&self) -> u32 {
        self.log_run
    }
}

impl Options {
    /// The kernel for a tensor.
    pub(super) fn kernel(&self, tensor: &Resident) -> Kernel {
        self.unscaled(tensor).or_else(|| self.built_in(tensor)).unwrap_or_else(|| self.any())
    }

    fn formats<'a>(&self, tensor: &'a Resident) -> &'a [StateFormat] {
        &tensor.formats[..self.kinds.len()]
    }

    /// A kernel of step.cu: all states f32, or all BF16.
    fn unscaled(&self, tensor: &Resident) -> Option<Kernel> {
        let formats = self.formats(tensor);
        if tensor.rest != 0 || tensor.skip_zeros || formats.iter().any(|format| *format != formats[0]) {
            return None;
        }
        let pair = (tensor.p_type, tensor.g_type);
        let module = match (self.rule, tensor.p_type) {
            ("adamw", ElementType::F32) => "step_adamw_f32",
            ("adamw", ElementType::Bf16) => "step_adamw_bf16",
            ("adamw", ElementType::Fp16) => "step_adamw_fp16",
            _ if !matches!(pair, (ElementType::F32, ElementType::F32) | (ElementType::Bf16, ElementType::Bf16)) => {
                return None;
            }
            ("adam", _) => "step_adam",
            ("sgd", _) => "step_sgd",
            ("lion", _) => "step_lion",
            ("ademamix", _) => "step_ademamix",
            ("lamb", _) => "step_lamb",
            _ => return None,
        };
        let (stored, of_states) = match formats[0] {
            StateFormat::F32 => ("f32".to_string(), "f32"),
            StateFormat::Bf16 => (rounded("bf16", self.states), "bf16"),
            StateFormat::Blocks(_) => return None,
        };
        if self.meter && stored != "bf16s" {
            return None;
        }
        let parameters = match tensor.p_type {
            ElementType::F32 => "f32".to_string(),
            other => rounded(other.name(), self.parameters),
        };
        let [p, g] = [tensor.p_type, tensor.g_type].map(ElementType::name);
        let meter = if self.meter { "_meter" } else { "" };
        Some(Kernel {
            module,
            name: format!("{}_{parameters}_{g}_{stored}{meter}", self.rule),
            takes: Takes::Many,
            blocks: None,
            ahead: if tensor.p_type == ElementType::F32 { AHEAD } else { AHEAD_OF_16_BITS },
            tile: THREADS * 8,
            norms: self.norms.then(|| (module, format!("norms_{}_{p}_{g}_{of_states}", self.rule))),
            align: 4,
            log_run: 0,
        })
    }

    /// A kernel of blocks.cu.
    fn built_in(&self, tensor: &Resident) -> Option<Kernel> {
        let [StateFormat::Blocks(m), StateFormat::Blocks(v)] = *self.formats(tensor) else { return None };
        let plain = m.block() == v.block() && [m, v].iter().all(|format| format.scale() == BlockScale::Ceil);
        if self.rule != "adamw" || self.meter || tensor.rest != 0 || tensor.skip_zeros || !plain {
            return None;
        }
        let pair = [m, v].map(|format| format.element().to_string().to_lowercase()).join("_");
        let (module, types, tile, blocks) = match (tensor.p_type, tensor.g_type) {
            (ElementType::F32, ElementType::F32) => ("blocks_f32", "f32_f32".to_string(), 8 * THREADS, None),
            (ElementType::Bf16, ElementType::Bf16) => {
                let blocks = BLOCKS[usize::from(m.element().bits() == 8)];
                ("blocks_bf16", format!("{}_bf16", rounded("bf16", self.parameters)), 16 * WARP, Some(blocks))
            }
            _ => return None,
        };
        BUILT_IN.contains(&&*pair).then(|| Kernel {
            module,
            name: rounded(&format!("blocks_{types}_{pair}_"), self.states),
            takes: Takes::Any,
            tile,
            blocks,
            ahead: 0,
            norms: None,
            align: 0,
            log_run: m.block().ilog2(),
        })
    }

    /// The kernel of any.cu.
    fn any(&self) -> Kernel {
        Kernel {
            module: "any",
            name: format!("any_{}", self.rule),
            takes: Takes::Any,
            // A run of 256 elements to each of four warps.
            tile: 4 * 256,
            blocks: None,
            ahead: 0,
            norms: self.norms.then(|| ("any", format!("norms_{}_any", self.rule))),
            align: 4,
            log_run: 8,
        }
    }
}

/// A launch over items whose kernel is the same.
#[derive(Clone, Debug)]
pub(super) struct PlannedLaunch {
    pub(super) kernel: Kernel,
    /// Its items, among those of the plan.
    pub(super) items: core::ops::Range<usize>,
    /// Where the items of its tiles are, and of its chunks, if there are norms.
    pub(super) places: [Places; 2],
    pub(super) tiles: u32,
    pub(super) chunks: u32,
    /// Chunks of the plan before those of this launch.
    pub(super) chunk: u32,
    /// As the first tensor has them, and all others.
    pub(super) p_type: ElementType,
    pub(super) g_type: ElementType,
    pub(super) states: [MomentArguments; MOST],
}

/// Entries of a table that tell the items of tiles: the item of every 2^`shift`-th one, from entry `at` on, and the last item that has
/// tiles.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Places {
    pub(super) at: usize,
    pub(super) shift: u32,
}

/// Entries of such a table for each item, at most. Few: a line of the table serves many tiles then, and stays in the cache of a
/// multiprocessor. With one entry for 16 tiles, on an H200, every block waited for it.
const PLACES: u64 = 4;

/// The launches of a list of tensors, and their tables.
#[derive(Clone, Debug, Default)]
pub(super) struct Tables {
    pub(super) items: Vec<Item>,
    pub(super) places: Vec<u32>,
    pub(super) launches: Vec<PlannedLaunch>,
    pub(super) chunks: u32,
}

/// Tensors whose launch is one.
struct Alike<'a> {
    kernel: Kernel,
    tensors: Vec<&'a Resident>,
}

impl Tables {
    pub(super) fn new(options: &Options, tensors: &[Resident]) -> Result<Self, CudaError> {
        let mut alike: Vec<Alike<'_>> = Vec::new();
        for tensor in tensors {
            let kernel = options.kernel(tensor);
            let same = |other: &Alike<'_>| {
                let first = other.tensors[0];
                other.kernel == kernel
                    && (kernel.takes == Takes::Many
                        || (first.p_type, first.g_type) == (tensor.p_type, tensor.g_type)
                            && options.formats(first) == options.formats(tensor))
            };
            match alike.iter_mut().find(|other| same(other)) {
                Some(other) => other.tensors.push(tensor),
                None => alike.push(Alike { kernel, tensors: alloc::vec![tensor] }),
            }
        }
        let mut tables = Self::default();
        for alike in alike {
            tables.add(options, alike)?;
        }
        Ok(tables)
    }

    /// The places of items that have so many tiles each, none of them behind the first that has none.
    fn add_places(&mut self, tiles: &[u64]) -> Places {
        let all: u64 = tiles.iter().sum();
        let shift = (0..).find(|shift| all >> shift < PLACES * tiles.len() as u64).unwrap_or_default();
        let at = self.places.len();
        let last = tiles.iter().rposition(|&tiles| tiles > 0).unwrap_or_default();
        let (mut item, mut before) = (0, 0);
        for tile in (0..all).step_by(1 << shift) {
            while before + tiles[item] <= tile {
                before += tiles[item];
                item += 1;
            }
            self.places.push(item as u32);
        }
        self.places.push(last as u32);
        Places { at, shift }
    }

    fn add(&mut self, options: &Options, Alike { kernel, mut tensors }: Alike<'_>) -> Result<(), CudaError> {
        let begin = self.items.len();
        // Items without a tile come last: no tile lies behind them.
        tensors.sort_by_key(|tensor| tensor.n == 0);
        let (mut tiles, mut chunks) = (Vec::new(), Vec::new());
        let [mut tile, mut chunk] = [0u64; 2];
        for tensor in &tensors {
            for (p, piece) in non_empty(tensor).enumerate() {
                if p > 0 && options.norms {
                    let reason = "norms of a tensor of more than 2^34 elements";
                    return Err(CudaError::Unsupported { argument: "params", reason });
                }
                let mut item = item(options, &kernel, tensor, &piece);
                let alone = piece.len == tensor.n;
                item.flags |= if alone { ALONE } else { LEADS * u32::from(p == 0) };
                let its_tiles = piece.len.div_ceil(kernel.tile);
                let its_chunks = if options.norms { piece.len.div_ceil(CHUNK) } else { 0 };
                item.tiles = its_tiles as u32;
                (item.tile, item.norm_tile, item.chunk) = (tile as u32, chunk as u32, self.chunks + chunk as u32);
                tiles.push(its_tiles);
                chunks.push(its_chunks);
                self.items.push(item);
                tile += its_tiles;
                chunk += its_chunks;
                // As many blocks as a grid has, or warps.
                const MOST_TILES: u64 = i32::MAX as u64;
                if tile > MOST_TILES || u64::from(self.chunks) + chunk > MOST_TILES {
                    let (expected, got) = (MOST_TILES * kernel.tile, tile * kernel.tile);
                    return Err(CudaError::Length { argument: "params", expected, got });
                }
            }
        }
        let places = [tiles, chunks].map(|tiles| self.add_places(&tiles));
        let like = tensors[0];
        self.launches.push(PlannedLaunch {
            items: begin..self.items.len(),
            places,
            tiles: tile as u32,
            chunks: chunk as u32,
            chunk: self.chunks,
            p_type: like.p_type,
            g_type: like.g_type,
            states: core::array::from_fn(|s| match options.kinds.get(s) {
                Some(kind) => moment(like.formats[s], kind.role, kernel.log_run),
                None => moment(StateFormat::F32, Role::FirstMoment, 0),
            }),
            kernel,
        });
        self.chunks += chunk as u32;
        Ok(())
    }
}

/// Elements of a chunk of a norm.
const CHUNK: u64 = crate::optim::Shard::CUT;

/// The pieces of a tensor, or one of nothing, so that its age goes on.
fn non_empty(tensor: &Resident) -> impl Iterator<Item = Piece> {
    let none = (tensor.n == 0).then_some(Piece { start: 0, len: 0, high: 0, group: 0, skip: 0 });
    none.into_iter().chain(pieces(tensor.first, tensor.n, 2))
}

fn item(options: &Options, kernel: &Kernel, tensor: &Resident, piece: &Piece) -> Item {
    let [p, g] = [(tensor.p, tensor.p_type), (tensor.g, tensor.g_type)].map(|(at, of)| at + piece.start * of.bytes());
    let mut item = Item {
        n: piece.len,
        p,
        g,
        rest: if tensor.rest == 0 { 0 } else { tensor.rest + 2 * piece.start },
        id: tensor.id,
        group: piece.group,
        high: piece.high,
        slot: tensor.slot,
        hyper: tensor.hyper,
        ..Item::zeroed()
    };
    let mut aligned = true;
    for ((s, &format), &at) in options.formats(tensor).iter().enumerate().zip(&tensor.states) {
        match format {
            StateFormat::F32 | StateFormat::Bf16 => {
                let size = if format == StateFormat::F32 { 4 } else { 2 };
                item.states[s] = at + piece.start * size;
                aligned &= item.states[s].is_multiple_of(size * kernel.align.max(1));
            }
            StateFormat::Blocks(format) => {
                item.states[s] = at + piece.start * u64::from(format.element().bits()) / 8;
                let size = if format.scale() == BlockScale::Amax { 4 } else { 1 };
                let scales = at + scales_at(format, tensor.n as usize) as u64;
                item.scales[s] = scales + piece.start / format.block() as u64 * size;
            }
        }
    }
    let whole_words = |at: u64, of: ElementType| match kernel.align {
        0 => at.is_multiple_of(16),
        elements => at.is_multiple_of(elements * of.bytes()),
    };
    if aligned && whole_words(p, tensor.p_type) && whole_words(g, tensor.g_type) {
        item.flags |= VECTOR;
    }
    item
}

/// Bytes of a state's memory before its scales: those of the codes, up to where an f32 is aligned if scales are f32.
pub(super) fn scales_at(format: BlockFormat, n: usize) -> usize {
    let codes = format.element().bytes(n);
    if format.scale() == BlockScale::Amax { codes.next_multiple_of(4) } else { codes }
}

/// How a state is stored; without blocks, `log_block` is that of the run.
pub(super) fn moment(format: StateFormat, role: Role, log_block: u32) -> MomentArguments {
    let (kind, element, log_block) = match format {
        StateFormat::F32 => (0, Format::BF16, log_block),
        StateFormat::Bf16 => (1, Format::BF16, log_block),
        StateFormat::Blocks(format) => {
            let kind = if format.scale() == BlockScale::Amax { 3 } else { 2 };
            (kind, format.element(), format.block().ilog2())
        }
    };
    MomentArguments {
        kind,
        fraction_bits: element.fraction_bits(),
        bias: element.bias(),
        floor: (role == Role::SecondMoment && element.has_zero()).into(),
        log_block,
        target: Target32::new(element, 0, Overflow::Saturate).expect("a normal number of these formats is one of f32"),
        max: element.max(),
        wide: Wide::new(element, Overflow::Saturate),
    }
}

#[cfg(test)]
mod tests {
    use super::super::emulated::{Emulated, REVERSE};
    use super::super::launch::{Shape, launch};
    use super::super::{Gpu, optimizer};
    use super::*;
    use crate::optim::{LambConfig, StepControl, combine, sealed};
    use crate::random::Draws;

    /// Norms of tensors of many chunks: none, one run of sums, several at once and more than that, from sums alone.
    #[test]
    fn norms_of_whole_tensors() {
        let gpu = match std::env::var_os("HALFULP_REQUIRE_GPU") {
            Some(_) => Gpu::open(0).unwrap(),
            None => match Emulated::new(REVERSE) {
                Some(device) => Gpu::emulated(device),
                None => return,
            },
        };
        const RUN: usize = CHUNK as usize;
        let config = LambConfig { max_trust: 1e9, ..LambConfig::default() };
        let chunks = [1, 0, RUN - 1, RUN, RUN + 1, 9 * RUN + 7, 3];
        let total: usize = chunks.iter().sum();
        let mut words = alloc::vec![0u32; 2 * total];
        crate::Draw::seeded(5).fill32(0, &mut words);
        // Over three binades, so that the order of additions shows.
        let sums: Vec<f64> = words.iter().map(|&word| f64::from(word % 1000 + 100) * 1.1).collect();
        let mut items = Vec::new();
        let mut before = 0;
        for n in chunks {
            items.push(Item { n: n as u64 * CHUNK, chunk: before as u32, ..Item::zeroed() });
            before += n;
        }
        let (on_device, records) = (gpu.upload(&items).unwrap(), gpu.zeroed::<Record>(items.len()).unwrap());
        let (device_sums, hyper) =
            (gpu.upload(&sums).unwrap(), gpu.upload(&optimizer::words(&config).unwrap()).unwrap());
        let trust = TrustArguments {
            items: on_device.address(),
            records: records.address(),
            hyper: hyper.address(),
            sums: device_sums.address(),
            chunks: total as u64,
        };
        let (threads, n) = (1024, 1024 * items.len() as u64);
        // SAFETY: memory as long as the items say.
        unsafe { launch(&gpu, "prepare", "trust_lamb", n, Shape { threads, each: 1 }, &trust) }.unwrap();
        let scalars = sealed::Rule::scalars(&config, [1; 3], &StepControl::default());
        for ((item, record), n) in items.iter().zip(gpu.download(&records).unwrap()).zip(chunks) {
            let at = item.chunk as usize;
            let [p, u] = [&sums[at..at + n], &sums[total + at..][..n]].map(|sums| combine(sums.to_vec()).sqrt());
            let expected = sealed::Rule::with_norms(&config, scalars, p, u).minus_step;
            // The ninth scalar.
            assert_eq!(record.0[32 + 8], expected.to_bits(), "{n} chunks");
        }
    }

    #[test]
    fn layouts() {
        assert_eq!(
            (size_of::<Item>(), size_of::<Record>(), size_of::<Clock>(), size_of::<DeviceCounts>()),
            (128, 256, 48, 80)
        );
        use core::mem::offset_of;
        let of_launch = offset_of!(ManyArguments, direct);
        let offsets = [
            offset_of!(Direct, seeded),
            offset_of!(Direct, record),
            offset_of!(Direct, scalars),
            offset_of!(Direct, seed_states),
            offset_of!(Direct, clock),
            offset_of!(Direct, ages),
            offset_of!(Direct, step),
            offset_of!(Direct, states),
            offset_of!(Direct, next_step),
        ];
        assert_eq!(offsets.map(|at| of_launch + at), [52, 56, 312, 832, 840, 848, 856, 864, 880]);
        assert_eq!(size_of::<ManyArguments>(), 888);
    }
}
