//! Pictures of the results.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Colours that people with any colour vision can tell apart.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

const GREY: RGBColor = RGBColor(232, 232, 232);
const PANEL: (u32, u32) = (560, 420);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// One chart of a picture.
pub enum Panel {
    /// Bars side by side, one group for each name and one bar in it for each series.
    Bars { title: String, groups: Vec<String>, series: Vec<(String, Vec<f64>)> },
    /// Lines over two logarithmic axes.
    Lines { title: String, x: String, series: Vec<(String, Vec<(f64, f64)>)> },
}

/// The panels side by side, as SVG.
pub fn draw(panels: &[Panel]) -> String {
    let mut picture = String::new();
    let count = u32::try_from(panels.len()).expect("a few panels");
    {
        let root = SVGBackend::with_string(&mut picture, (PANEL.0 * count, PANEL.1)).into_drawing_area();
        let drawn = root.fill(&WHITE).map_err(Into::into).and_then(|()| {
            for (area, panel) in root.split_evenly((1, panels.len())).iter().zip(panels) {
                match panel {
                    Panel::Bars { title, groups, series } => bars(area, title, groups, series)?,
                    Panel::Lines { title, x, series } => lines(area, title, x, series)?,
                }
            }
            root.present().map_err(Box::<dyn Error>::from)
        });
        drawn.expect("a String takes any picture");
    }
    picture
}

fn bars(area: &Area<'_>, title: &str, groups: &[String], series: &[(String, Vec<f64>)]) -> Result<(), Box<dyn Error>> {
    let area = legend(area, title, series.iter().map(|(name, _)| name.as_str()))?;
    let most =
        series.iter().flat_map(|(_, values)| values).copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(24)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..groups.len() as f64, 0.0..most.max(1e-9) * 1.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GREY)
        .y_label_style(("sans-serif", 12))
        .y_label_formatter(&|value| shown(*value))
        .draw()?;
    let width = 0.86 / series.len() as f64;
    for (group, name) in groups.iter().enumerate() {
        for (index, (_, values)) in series.iter().enumerate() {
            let value = values.get(group).copied().filter(|value| value.is_finite());
            let Some(value) = value else { continue };
            let (left, colour) = (group as f64 + 0.07 + width * index as f64, COLOURS[index % COLOURS.len()]);
            chart.draw_series([Rectangle::new([(left, 0.0), (left + width * 0.92, value)], colour.filled())])?;
            let position = inside(&area, chart.backend_coord(&(left + width * 0.46, value)));
            area.draw_text(&shown(value), &label(10, HPos::Center), (position.0, position.1 - 7))?;
        }
        let position = inside(&area, chart.backend_coord(&(group as f64 + 0.5, 0.0)));
        area.draw_text(name, &label(13, HPos::Center), (position.0, position.1 + 13))?;
    }
    Ok(())
}

fn lines(area: &Area<'_>, title: &str, x: &str, series: &[(String, Vec<(f64, f64)>)]) -> Result<(), Box<dyn Error>> {
    let area = legend(area, title, series.iter().map(|(name, _)| name.as_str()))?;
    let points = || series.iter().flat_map(|(_, points)| points.iter().copied());
    let bounds = |of: fn((f64, f64)) -> f64| {
        let (least, most) = points().map(of).fold((f64::INFINITY, 0.0_f64), |(l, m), v| (l.min(v), m.max(v)));
        (least * 0.7)..(most * 1.4)
    };
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(52)
        .build_cartesian_2d(bounds(|(x, _)| x).log_scale(), bounds(|(_, y)| y).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GREY)
        .x_desc(x)
        .axis_desc_style(("sans-serif", 13))
        .label_style(("sans-serif", 12))
        .x_label_formatter(&|value| shown(*value))
        .y_label_formatter(&|value| shown(*value))
        .draw()?;
    for (index, (_, points)) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
        for point in points {
            let position = inside(&area, chart.backend_coord(point));
            let style = label(11, HPos::Center).color(&colour);
            area.draw_text(&shown(point.1), &style, (position.0, position.1 - 11))?;
        }
    }
    Ok(())
}

/// Draws the title and the names of the series, and returns what is left below.
fn legend<'a, 'b>(
    area: &Area<'a>,
    title: &str,
    names: impl Iterator<Item = &'b str>,
) -> Result<Area<'a>, Box<dyn Error>> {
    area.draw_text(title, &label(16, HPos::Left), (16, 20))?;
    let mut bottom = 34;
    for (index, name) in names.enumerate() {
        let (column, row) = (i32::try_from(index % 2)?, i32::try_from(index / 2)?);
        let (left, top) = (18 + 268 * column, 36 + 18 * row);
        area.draw(&Rectangle::new([(left, top), (left + 12, top + 12)], COLOURS[index % COLOURS.len()].filled()))?;
        area.draw_text(name, &label(12, HPos::Left), (left + 18, top + 6))?;
        bottom = top + 18;
    }
    Ok(area.margin(bottom, 0, 0, 0))
}

/// A number as short as its reader needs it.
fn shown(value: f64) -> String {
    match value {
        large if large >= 1_000_000.0 => format!("{:.1} M", large / 1_000_000.0),
        large if large >= 10_000.0 => format!("{:.0} k", large / 1000.0),
        large if large >= 1_000.0 => format!("{:.1} k", large / 1000.0),
        middle if middle >= 10.0 || middle == 0.0 => format!("{middle:.0}"),
        small => format!("{small:.2}"),
    }
}

fn label(size: i32, horizontal: HPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size)).pos(Pos::new(horizontal, VPos::Center))
}

/// A position in the picture as one in the area, which is what text is drawn by.
fn inside(area: &Area<'_>, (x, y): (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (x - left, y - top)
}
