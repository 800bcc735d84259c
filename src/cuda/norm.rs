//! The global gradient norm of device memory.

use alloc::vec::Vec;
use core::marker::PhantomData;

use super::cast::Source;
use super::gpu::Place;
use super::launch::{ChunksArguments, CombineArguments, Device, Shape, THREADS, aligned, launch};
use super::{CudaError, DeviceVec, ElementType, Gpu};
use crate::optim::{ChunkSums, Clip, ClipRule, GradientNorm, NormError, Shard};

/// Somebody else's gradients of one tensor, or of a shard of it: address and type. The shard says how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientMemory {
    /// The tensor's id.
    pub id: u64,
    /// Which part of the tensor.
    pub shard: Shard,
    /// Address of the shard's first gradient, aligned to its size.
    pub grads: u64,
    /// Type of the gradients.
    pub grads_type: ElementType,
}

/// Gradients of one tensor, or of a shard of it, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGradients<'a> {
    memory: GradientMemory,
    place: Place,
    borrowed: PhantomData<&'a [u8]>,
}

impl<'a> DeviceGradients<'a> {
    /// Of a whole tensor.
    #[must_use]
    pub fn of<G: Source>(id: u64, grads: &'a DeviceVec<G>) -> Self {
        Self::new(id, Shard::whole(grads.len() as u64), grads)
    }

    /// Of a shard.
    ///
    /// # Errors
    /// [`CudaError::Length`] if there are not as many as the shard has elements.
    pub fn of_shard<G: Source>(id: u64, shard: Shard, grads: &'a DeviceVec<G>) -> Result<Self, CudaError> {
        let got = grads.len() as u64;
        if shard.len() != got {
            return Err(CudaError::Length { argument: "grads", expected: shard.len(), got });
        }
        Ok(Self::new(id, shard, grads))
    }

    fn new<G: Source>(id: u64, shard: Shard, grads: &'a DeviceVec<G>) -> Self {
        let memory = GradientMemory { id, shard, grads: grads.address(), grads_type: G::TYPE };
        Self { memory, place: grads.place(), borrowed: PhantomData }
    }
}

/// What a norm leaves in device memory, 16 bytes, and on the host when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct NormResult {
    /// The sum of squares.
    pub sum_of_squares: f64,
    /// The clip coefficient by its formula, also where the sum is not finite: [`Clip::coefficient`] under
    /// [`NonFinite::Propagate`](crate::optim::NonFinite::Propagate).
    pub clip: f32,
    /// 1 if a gradient is NaN or infinite, else 0.
    pub found_inf: u32,
}

/// A chunk for the kernel: `Chunk` of norm.cu.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Chunk {
    at: u64,
    n: u32,
    of: u32,
}

/// Elements of a chunk, and sums of a run.
const CHUNK: u64 = Shard::CUT;

/// The global norm of gradients on a GPU: the bits of [`GradientNorm`], in the order that [`ChunkSums`] defines.
///
/// One kernel reads every gradient once, one or two tiny ones finish (a third from 7e10 elements on). Nothing waits: result
/// and coefficient stay in device memory, at [`address`](Self::address). A table of chunks is sent to the device when the list
/// of tensors differs from that of the last call, and then only.
#[derive(Debug)]
pub struct DeviceNorm {
    gpu: Gpu,
    list: Vec<GradientMemory>,
    /// The list by tensor and start.
    sorted: Vec<GradientMemory>,
    chunks: DeviceVec<Chunk>,
    /// Sums of chunks, of runs of chunks, and so on until one is left.
    levels: Vec<DeviceVec<f64>>,
    result: DeviceVec<NormResult>,
}

impl DeviceNorm {
    /// Of no gradients yet.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        // Of nothing, which nothing clips.
        let result = NormResult { sum_of_squares: 0.0, clip: 1.0, found_inf: 0 };
        let (chunks, result) = (gpu.zeroed(0)?, gpu.upload(&[result])?);
        let levels = lengths(0).into_iter().map(|n| gpu.zeroed(n)).collect::<Result<_, _>>()?;
        Ok(Self { gpu: gpu.clone(), list: Vec::new(), sorted: Vec::new(), chunks, levels, result })
    }

    /// Enqueues the norm of these gradients and the coefficient that clips them once they are multiplied by
    /// `gradient_scale`. The order of the list changes no bit.
    ///
    /// Of shards that are not whole tensors this is the norm of what is here; [`chunk_sums`](Self::chunk_sums) are what to
    /// gather then.
    ///
    /// # Errors
    /// [`CudaError::WrongDevice`], [`CudaError::WrongStream`], [`CudaError::OutOfMemory`], and [`CudaError::Norm`] for two shards of one tensor that
    /// overlap or disagree on its length.
    pub fn enqueue(
        &mut self,
        clip: &Clip,
        gradient_scale: f32,
        gradients: &[DeviceGradients<'_>],
    ) -> Result<(), CudaError> {
        gradients.iter().try_for_each(|gradients| self.gpu.own_place(gradients.place, "grads"))?;
        let list: Vec<GradientMemory> = gradients.iter().map(|gradients| gradients.memory).collect();
        // SAFETY: buffers of this device, as long as their shards say, borrowed until the work is enqueued; a buffer is freed
        // in stream order.
        unsafe { self.enqueue_raw(clip, gradient_scale, &list) }
    }

    /// [`enqueue`](Self::enqueue) of somebody else's memory.
    ///
    /// # Safety
    /// Addresses are device memory of this device, as long as the shards say until the work is done. Gradients were written by
    /// work that this stream comes after, and nothing writes them in the meantime.
    ///
    /// # Errors
    /// [`CudaError::Misaligned`], and as [`enqueue`](Self::enqueue).
    pub unsafe fn enqueue_raw(
        &mut self,
        clip: &Clip,
        gradient_scale: f32,
        gradients: &[GradientMemory],
    ) -> Result<(), CudaError> {
        if self.list != gradients {
            self.rebuild(gradients)?;
        }
        let levels: Vec<_> = self.levels.iter().map(|level| (level.address(), level.len() as u64)).collect();
        let (chunks, result) = (self.chunks.address(), self.result.address());
        // SAFETY: one block a chunk of the table, whose gradients are promised by the caller; levels are of these lengths.
        unsafe { launch_all(&self.gpu, chunks, &levels, result, clip.rule(gradient_scale)) }
    }

    /// Makes the table of a list of gradients.
    fn rebuild(&mut self, gradients: &[GradientMemory]) -> Result<(), CudaError> {
        let mut sorted = gradients.to_vec();
        sorted.sort_by_key(|memory| (memory.id, memory.shard.start()));
        for memory in &sorted {
            aligned("grads", memory.grads, memory.grads_type.bytes())?;
        }
        // A rank that owns nothing of a tensor has nothing that could overlap.
        let owned: Vec<&GradientMemory> = sorted.iter().filter(|memory| !memory.shard.is_empty()).collect();
        for pair in owned.windows(2).filter(|pair| pair[0].id == pair[1].id) {
            check_pair(pair[0].id, pair[0].shard, pair[1].shard)?;
        }
        let chunks: Vec<Chunk> = sorted.iter().flat_map(chunks).collect();
        let levels = lengths(chunks.len()).into_iter().map(|n| self.gpu.zeroed(n)).collect::<Result<_, _>>()?;
        let chunks = self.gpu.upload(&chunks)?;
        (self.list, self.sorted, self.chunks, self.levels) = (gradients.to_vec(), sorted, chunks, levels);
        Ok(())
    }

    /// Address of the [`NormResult`] of the last call, valid as long as this lives; work of the same stream finds it written.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.result.address()
    }

    /// Refuses another device than this one's.
    pub(super) fn own(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.own(&self.result, "norm")
    }

    /// The result of the last call. Waits for it.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn result(&self) -> Result<NormResult, CudaError> {
        Ok(self.gpu.download(&self.result)?[0])
    }

    /// The sums of the last call's chunks, by tensor and start: what ranks gather. Waits for them.
    ///
    /// # Errors
    /// As [`Gpu::download`].
    pub fn chunk_sums(&self) -> Result<Vec<ChunkSums>, CudaError> {
        let sums = self.gpu.download(&self.levels[0])?;
        let mut rest = &sums[..];
        let part = |memory: &GradientMemory| {
            let (own, others) = rest.split_at(memory.shard.chunks() as usize);
            rest = others;
            Ok(ChunkSums::from_sums(memory.id, memory.shard, own.to_vec())?)
        };
        self.sorted.iter().map(part).collect()
    }

    /// The norm of the last call, if its gradients were whole tensors. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::Norm`] if they were not, and as [`Gpu::download`].
    pub fn norm(&self) -> Result<GradientNorm, CudaError> {
        Ok(GradientNorm::gather(&self.chunk_sums()?)?)
    }
}

/// Launches the kernels of a norm: sums of the chunks in a table, then of runs of sums, from level to level, each an address and
/// a number of sums.
///
/// # Safety
/// The table has as many chunks as the first level has sums, and their memory is as they say; the lengths are those that
/// [`lengths`] gives; a [`NormResult`] has room at `result`.
pub(super) unsafe fn launch_all(
    device: &impl Device,
    chunks: u64,
    levels: &[(u64, u64)],
    result: u64,
    clip: ClipRule,
) -> Result<(), CudaError> {
    let threads = u64::from(THREADS);
    let (sums, count) = levels[0];
    if count > 0 {
        let arguments = ChunksArguments { chunks, sums };
        // SAFETY: one block a chunk of the table, promised by the caller.
        unsafe { launch(device, "norm", "norm_chunks", count * threads, Shape::of(1), &arguments) }?;
    }
    for (level, pair) in levels.windows(2).enumerate() {
        let ((sums, n), (out, runs)) = (pair[0], pair[1]);
        let norm = if level + 2 == levels.len() { result } else { 0 };
        let arguments = CombineArguments { sums, n, out, norm, clip };
        // SAFETY: one block a run; each level has room for what its runs give.
        unsafe { launch(device, "norm", "norm_combine", runs * threads, Shape::of(1), &arguments) }?;
    }
    Ok(())
}

/// The number of sums of so many chunks, of their runs, and so on: one run at least.
pub(super) fn lengths(chunks: usize) -> Vec<usize> {
    let mut lengths = alloc::vec![chunks];
    let mut n = chunks;
    loop {
        n = n.div_ceil(CHUNK as usize).max(1);
        lengths.push(n);
        if n == 1 {
            return lengths;
        }
    }
}

/// The chunks of one shard.
pub(super) fn chunks(memory: &GradientMemory) -> impl Iterator<Item = Chunk> {
    let GradientMemory { shard, grads, grads_type, .. } = *memory;
    (0..shard.len()).step_by(CHUNK as usize).map(move |first| Chunk {
        at: grads + first * grads_type.bytes(),
        n: (shard.len() - first).min(CHUNK) as u32,
        of: grads_type as u32,
    })
}

/// Checks two shards of one tensor that own something, the first of which starts no later.
fn check_pair(tensor: u64, first: Shard, second: Shard) -> Result<(), NormError> {
    if first.total() != second.total() {
        return Err(NormError::Total { tensor, expected: first.total(), got: second.total() });
    }
    if second.start() < first.end() {
        return Err(NormError::Cover { tensor, expected: first.end(), got: second.start() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_of_a_shard() {
        let shard = Shard::new(4096..13_000, 13_000).unwrap();
        let memory = GradientMemory { id: 1, shard, grads: 1 << 40, grads_type: ElementType::Bf16 };
        let table: Vec<_> = chunks(&memory).map(|chunk| (chunk.at - (1 << 40), chunk.n, chunk.of)).collect();
        assert_eq!(table, [(0, 4096, 1), (8192, 4096, 1), (16_384, 712, 1)]);
        assert_eq!(chunks(&GradientMemory { shard: Shard::whole(0), ..memory }).count(), 0);
        assert_eq!([ElementType::F32, ElementType::Bf16, ElementType::Fp16].map(|of| of as u32), [0, 1, 2]);
    }

    #[test]
    fn pairs_of_shards() {
        let shard = |range| Shard::new(range, 20_000).unwrap();
        assert_eq!(check_pair(1, shard(0..4096), shard(8192..20_000)), Ok(()));
        let overlap = NormError::Cover { tensor: 1, expected: 8192, got: 4096 };
        assert_eq!(check_pair(1, shard(0..8192), shard(4096..20_000)), Err(overlap));
        let total = NormError::Total { tensor: 1, expected: 20_000, got: 4096 };
        assert_eq!(check_pair(1, shard(0..4096), Shard::whole(4096)), Err(total));
    }
}
