//! Panels as SVG and PNG. Nothing of the machine is used: the letters of the PNG come from a font inside the program.

use std::sync::Once;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::curves::{Curve, Panel};

const FAMILY: &str = "sans-serif";
/// Pixels of a panel.
const WIDTH: u32 = 760;
const HEIGHT: u32 = 460;

/// Colours that are told apart by most eyes, also in print (after Okabe and Ito).
const COLOURS: &[RGBColor] = &[
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
    RGBColor(120, 120, 120),
];

/// The panels as an SVG document.
pub fn svg(panels: &[Panel]) -> Result<String, String> {
    let mut text = String::new();
    draw(SVGBackend::with_string(&mut text, extent(panels)?).into_drawing_area(), panels)?;
    Ok(text)
}

/// The panels as a PNG file.
pub fn png(panels: &[Panel]) -> Result<Vec<u8>, String> {
    let (width, height) = extent(panels)?;
    let mut pixels = vec![0u8; width as usize * height as usize * 3];
    draw(BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area(), panels)?;
    let mut out = Vec::new();
    let mut encoder = ::png::Encoder::new(&mut out, width, height);
    encoder.set_color(::png::ColorType::Rgb);
    encoder.set_depth(::png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer.write_image_data(&pixels).map_err(|error| error.to_string())?;
    writer.finish().map_err(|error| error.to_string())?;
    Ok(out)
}

/// Rows and columns of panels: two columns where there is more than one.
fn grid(panels: usize) -> (u32, u32) {
    let columns = panels.min(2) as u32;
    ((panels as u32).div_ceil(columns.max(1)), columns)
}

fn extent(panels: &[Panel]) -> Result<(u32, u32), String> {
    let (rows, columns) = grid(panels.len());
    match panels.len() {
        0 => Err("there is nothing to draw".to_owned()),
        // The height of an image is 16 bits in some viewers.
        1..=64 => Ok((columns * WIDTH, rows * HEIGHT)),
        many => Err(format!("{many} panels: more than 64")),
    }
}

fn draw<B: DrawingBackend>(area: DrawingArea<B, Shift>, panels: &[Panel]) -> Result<(), String> {
    static FONT: Once = Once::new();
    // Once it is known that the bytes are a font, they stay one.
    FONT.call_once(|| {
        let _ = plotters::style::register_font(FAMILY, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
    let told = |error: String| format!("cannot draw: {error}");
    area.fill(&WHITE).map_err(|error| told(error.to_string()))?;
    let (rows, columns) = grid(panels.len());
    for (panel, part) in panels.iter().zip(area.split_evenly((rows as usize, columns as usize))) {
        match panel.is_log {
            true => one(&part, panel, log_range(panel).log_scale()).map_err(told)?,
            false => one(&part, panel, 0.0..1.08 * largest(panel)).map_err(told)?,
        }
    }
    area.present().map_err(|error| told(error.to_string()))
}

fn values(panel: &Panel) -> impl Iterator<Item = (f64, f64)> + '_ {
    panel.curves.iter().flat_map(|curve| curve.points.iter().copied())
}

fn largest(panel: &Panel) -> f64 {
    values(panel).map(|(_, value)| value).fold(0.0, f64::max)
}

fn log_range(panel: &Panel) -> std::ops::Range<f64> {
    let least = values(panel).map(|(_, value)| value).fold(f64::INFINITY, f64::min);
    least / 1.5..largest(panel) * 1.5
}

fn one<B, Y>(area: &DrawingArea<B, Shift>, panel: &Panel, vertical: Y) -> Result<(), String>
where
    B: DrawingBackend,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let told = |error: DrawingAreaErrorKind<B::ErrorType>| error.to_string();
    let sizes = values(panel).map(|(size, _)| size);
    let (least, most) = sizes.fold((f64::INFINITY, 0.0), |(a, b), size| (size.min(a), size.max(b)));
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FAMILY, 20))
        .margin(14)
        .x_label_area_size(42)
        .y_label_area_size(64)
        .build_cartesian_2d((least / 1.3..most * 1.3).log_scale().base(2.0), vertical)
        .map_err(told)?;
    chart
        .configure_mesh()
        .light_line_style(BLACK.mix(0.05))
        .bold_line_style(BLACK.mix(0.15))
        .label_style((FAMILY, 14))
        .axis_desc_style((FAMILY, 15))
        .x_desc("bytes of a block")
        .y_desc(panel.axis)
        .x_label_formatter(&|size| short_size(*size))
        .y_label_formatter(&|value| short_value(*value))
        .draw()
        .map_err(told)?;
    for (Curve { name, points }, colour) in panel.curves.iter().zip(COLOURS.iter().cycle()) {
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
        let drawn = chart.draw_series(line).map_err(told)?;
        drawn.label(name).legend(|(x, y)| Rectangle::new([(x, y - 2), (x + 16, y + 2)], colour.filled()));
        let dots = points.iter().map(|place| Circle::new(*place, 3, colour.filled()));
        chart.draw_series(dots).map_err(told)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font((FAMILY, 14))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .draw()
        .map_err(told)
}

fn short_size(bytes: f64) -> String {
    const UNITS: &[(f64, &str)] = &[(1073741824.0, "G"), (1048576.0, "M"), (1024.0, "K")];
    let unit = UNITS.iter().find(|(unit, _)| bytes >= *unit);
    unit.map_or_else(|| format!("{bytes:.0}"), |(unit, letter)| format!("{:.0}{letter}", bytes / unit))
}

fn short_value(value: f64) -> String {
    if value >= 10.0 || value == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(is_log: bool) -> Panel {
        let curve = |name: &str, factor: f64| Curve {
            name: name.to_owned(),
            points: (10..=20).map(|n| (f64::from(1 << n), factor * f64::from(n))).collect(),
        };
        Panel {
            title: "WRITE: bandwidth".to_owned(),
            axis: "GB/s",
            is_log,
            curves: vec![curve("imm", 2.0), curve("off & <send>", 3.0)],
        }
    }

    /// Pixels that are neither white nor of a light grey.
    fn inked(png: &[u8], x: std::ops::Range<usize>, y: std::ops::Range<usize>) -> usize {
        let mut reader = ::png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        let dark = |x: usize, y: usize| {
            let at = (y * info.width as usize + x) * 3;
            pixels[at..at + 3].iter().any(|part| *part < 128)
        };
        y.map(|y| x.clone().filter(|x| dark(*x, y)).count()).sum()
    }

    #[test]
    fn a_png_has_letters_though_no_font_is_asked_of_the_system() {
        let png = png(&[panel(false), panel(true)]).unwrap();
        assert!(png.starts_with(b"\x89PNG"));
        // The title, and the labels below the horizontal axis.
        assert!(inked(&png, 0..WIDTH as usize, 8..36) > 200);
        assert!(inked(&png, 100..WIDTH as usize, HEIGHT as usize - 36..HEIGHT as usize - 8) > 100);
    }

    #[test]
    fn an_svg_names_curves_and_axes_and_escapes_what_it_must() {
        let text = svg(&[panel(false)]).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for word in ["WRITE: bandwidth", "GB/s", "imm", "off &amp; &lt;send&gt;", "1M", "64K"] {
            assert!(text.contains(word), "{word} is not in the text");
        }
        assert!(text.matches("<polyline").count() >= 2);
    }

    #[test]
    fn one_single_point_is_a_picture_too() {
        let curves = vec![Curve { name: "one".to_owned(), points: vec![(4096.0, 1.0)] }];
        for is_log in [true, false] {
            let one = Panel { curves: curves.clone(), ..panel(is_log) };
            svg(std::slice::from_ref(&one)).unwrap();
            png(&[one]).unwrap();
        }
    }

    #[test]
    fn nothing_to_draw_is_said() {
        assert!(svg(&[]).unwrap_err().contains("nothing to draw"));
        assert!(png(&[]).unwrap_err().contains("nothing to draw"));
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(
            ["8", "1K", "64K", "1M", "2G"],
            [8.0, 1024.0, 65536.0, 1048576.0, 2147483648.0].map(short_size)
        );
    }
}
