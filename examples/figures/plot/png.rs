//! The PNG of an SVG, with the font that ships beside this example: no font of the machine is looked at.

use std::collections::BTreeMap;
use std::sync::Arc;

use png::{BitDepth, ColorType, Compression, Encoder, Filter};
use resvg::tiny_skia::{Color, Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb::Database};

use super::draw::UNITS;
use crate::Error;

const FONTS: [&[u8]; 2] = [include_bytes!("../font/Inter-Regular.otf"), include_bytes!("../font/Inter-SemiBold.otf")];

type Rgb = [u8; 3];

/// Renders at one pixel a px.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, Error> {
    let mut fonts = Database::new();
    FONTS.iter().for_each(|font| fonts.load_font_data(font.to_vec()));
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options)?;
    let size = tree.size().to_int_size();
    let (width, height) = (size.width() / UNITS, size.height() / UNITS);
    let mut canvas = Pixmap::new(width, height).ok_or("an SVG without a size")?;
    canvas.fill(Color::WHITE);
    let scale = 1.0 / UNITS as f32;
    resvg::render(&tree, Transform::from_scale(scale, scale), &mut canvas.as_mut());

    let pixels: Vec<Rgb> = canvas.pixels().iter().map(|pixel| [pixel.red(), pixel.green(), pixel.blue()]).collect();
    let (palette, indices) = indexed(&pixels);
    let mut bytes = vec![];
    let mut encoder = Encoder::new(&mut bytes, width, height);
    encoder.set_color(ColorType::Indexed);
    encoder.set_depth(BitDepth::Eight);
    encoder.set_palette(palette.concat());
    encoder.set_compression(Compression::High);
    encoder.set_filter(Filter::NoFilter);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&indices)?;
    writer.finish()?;
    Ok(bytes)
}

/// The 256 most frequent colours, and for each pixel the number of its own, or of the nearest: what is left out are shades
/// at the edges of letters and lines.
fn indexed(pixels: &[Rgb]) -> (Vec<Rgb>, Vec<u8>) {
    let mut counts: BTreeMap<Rgb, usize> = BTreeMap::new();
    for pixel in pixels {
        *counts.entry(*pixel).or_default() += 1;
    }
    let mut colors: Vec<Rgb> = counts.keys().copied().collect();
    // Stable: where counts are equal the order of colours decides.
    colors.sort_by_key(|color| std::cmp::Reverse(counts[color]));
    let palette: Vec<Rgb> = colors.iter().copied().take(256).collect();
    let distance = |a: Rgb, b: Rgb| a.iter().zip(b).map(|(a, b)| u32::from(a.abs_diff(b)).pow(2)).sum::<u32>();
    let number =
        |color: Rgb| (0..=255u8).zip(&palette).min_by_key(|(_, own)| distance(**own, color)).map_or(0, |(i, _)| i);
    let numbers: BTreeMap<Rgb, u8> = colors.iter().map(|&color| (color, number(color))).collect();
    (palette, pixels.iter().map(|pixel| numbers[pixel]).collect())
}
