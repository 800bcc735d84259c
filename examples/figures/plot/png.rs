//! The PNG of an SVG, with the font that ships beside this example: no font of the machine is looked at.

use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb::Database};

use super::draw::UNITS;
use crate::Error;

const FONTS: [&[u8]; 2] = [include_bytes!("../font/Inter-Regular.otf"), include_bytes!("../font/Inter-SemiBold.otf")];

/// Renders at one pixel a px.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, Error> {
    let mut fonts = Database::new();
    FONTS.iter().for_each(|font| fonts.load_font_data(font.to_vec()));
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options)?;
    let size = tree.size().to_int_size();
    let mut pixels = Pixmap::new(size.width() / UNITS, size.height() / UNITS).ok_or("an SVG without a size")?;
    let scale = 1.0 / UNITS as f32;
    resvg::render(&tree, Transform::from_scale(scale, scale), &mut pixels.as_mut());
    Ok(pixels.encode_png()?)
}
