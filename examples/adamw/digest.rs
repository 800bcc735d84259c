//! A hash of parameters and moments, by which runs are compared bit for bit.

use bytemuck::Pod;
use halfulp::optim::Moment;

/// FNV-1a 64 of bytes.
pub(crate) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Digest {
    pub(crate) fn take<T: Pod>(&mut self, values: &[T]) {
        for byte in bytemuck::cast_slice::<T, u8>(values) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }

    /// As stored: codes and scales.
    pub(crate) fn take_moment(&mut self, moment: &Moment) -> Result<(), &'static str> {
        match moment {
            Moment::F32(moment) => self.take(moment),
            Moment::Bf16(moment) => self.take(moment),
            Moment::Blocks(moment) => {
                self.take(moment.codes());
                let scales = (0..moment.scales().len()).map(|b| moment.scales().get(b).to_bits());
                self.take(&scales.collect::<Vec<_>>());
            }
            _ => return Err("digest: a moment of a format unknown here"),
        }
        Ok(())
    }

    pub(crate) fn value(&self) -> u64 {
        self.0
    }
}
