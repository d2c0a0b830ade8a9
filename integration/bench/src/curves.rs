//! Files of earlier runs as curves: bandwidth and latency over the size of a block.

use std::collections::BTreeSet;

use crate::records::Record;
use crate::row::{Row, rows_from_csv};

/// One measured case.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The curve that it is on, e.g. `imm` or `baton-tcp`.
    pub curve: String,
    /// `WRITE` or `READ`.
    pub op: String,
    /// Blocks of an iteration.
    pub batch: u64,
    /// Bytes of a block.
    pub size_bytes: u64,
    /// Gigabytes per second.
    pub gb_per_s: f64,
    /// Median latency of an iteration, zero where it was not measured.
    pub latency_us: f64,
}

/// Points through which a line goes, by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Size in bytes and what was measured; all positive.
    pub points: Vec<(f64, f64)>,
}

/// Curves over the same axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// What stands above it.
    pub title: String,
    /// What the vertical axis shows.
    pub axis: &'static str,
    /// Whether that axis is logarithmic; the horizontal one always is.
    pub is_log: bool,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// The points in a file that `baton-bench` or `cargo xtask bench` wrote: rows as JSON or CSV, or records as JSON.
pub fn points_of(text: &str) -> Result<Vec<Point>, String> {
    if !text.trim_start().starts_with('[') {
        let rows =
            rows_from_csv(text).map_err(|error| format!("neither a JSON list nor CSV with rows: {error}"))?;
        return Ok(rows.iter().map(Point::from).collect());
    }
    if let Ok(rows) = serde_json::from_str::<Vec<Row>>(text) {
        return Ok(rows.iter().map(Point::from).collect());
    }
    let records: Vec<Record> =
        serde_json::from_str(text).map_err(|error| format!("neither rows nor records: {error}"))?;
    Ok(records.iter().map(Point::from).collect())
}

impl From<&Row> for Point {
    fn from(row: &Row) -> Point {
        Point {
            curve: format!("{} {}", row.fabric, row.arm),
            op: row.op.clone(),
            batch: row.batch,
            size_bytes: row.size_bytes,
            gb_per_s: row.gb_per_s,
            latency_us: row.lat_p50_us,
        }
    }
}

impl From<&Record> for Point {
    fn from(record: &Record) -> Point {
        Point {
            curve: record.peer.clone(),
            op: record.op.clone(),
            batch: record.batch,
            size_bytes: record.size_bytes,
            gb_per_s: record.gbps_median / 8.0,
            latency_us: record.latency_us_p50,
        }
    }
}

/// Panels of several files, each with the name that tells its curves from the others': for every direction one with
/// bandwidths and one with latencies.
pub fn panels(files: &[(String, Vec<Point>)]) -> Vec<Panel> {
    let batches: BTreeSet<u64> =
        files.iter().flat_map(|(_, points)| points).map(|point| point.batch).collect();
    let mut ops: Vec<&str> = Vec::new();
    for point in files.iter().flat_map(|(_, points)| points) {
        if !ops.contains(&point.op.as_str()) {
            ops.push(&point.op);
        }
    }
    let name = |file: &str, point: &Point| {
        let mut words = Vec::new();
        words.extend((files.len() > 1).then(|| file.to_owned()));
        words.push(point.curve.clone());
        words.extend((batches.len() > 1).then(|| format!("x{}", point.batch)));
        words.join(" ")
    };
    let curves = |op: &str, value: fn(&Point) -> f64| {
        let mut curves: Vec<Curve> = Vec::new();
        for (file, points) in files {
            for point in
                points.iter().filter(|point| point.op == op && value(point) > 0.0 && point.size_bytes > 0)
            {
                let name = name(file, point);
                let place = (point.size_bytes as f64, value(point));
                match curves.iter_mut().find(|curve| curve.name == name) {
                    Some(curve) => curve.points.push(place),
                    None => curves.push(Curve { name, points: vec![place] }),
                }
            }
        }
        for curve in &mut curves {
            curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        curves
    };
    let bandwidth = ops.iter().map(|op| Panel {
        title: format!("{op}: bandwidth"),
        axis: "GB/s",
        is_log: false,
        curves: curves(op, |point| point.gb_per_s),
    });
    let latency = ops.iter().map(|op| Panel {
        title: format!("{op}: median latency"),
        axis: "µs",
        is_log: true,
        curves: curves(op, |point| point.latency_us),
    });
    bandwidth.chain(latency).filter(|panel| !panel.curves.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::rows_to_csv;

    fn row(op: &str, size_bytes: u64, gb_per_s: f64) -> Row {
        let words = |word: &str| word.to_owned();
        Row {
            op: words(op),
            arm: words("imm"),
            fabric: words("tcp"),
            size_bytes,
            batch: 4,
            gb_per_s,
            lat_p50_us: 10.0,
            ..Row::default()
        }
    }

    #[test]
    fn rows_and_records_are_read_in_every_form_that_is_written() {
        let rows = vec![row("WRITE", 4096, 2.0)];
        let points = points_of(&serde_json::to_string(&rows).unwrap()).unwrap();
        assert_eq!(
            (points[0].curve.as_str(), points[0].gb_per_s, points[0].latency_us),
            ("tcp imm", 2.0, 10.0)
        );
        assert_eq!(points_of(&rows_to_csv(&rows).unwrap()).unwrap(), points);
        let record = r#"[{"peer": "ucx", "op": "READ", "notify": true, "size_bytes": 64, "batch": 1, "gbps_median": 8.0,
            "gbps_min": 8.0, "gbps_max": 8.0, "latency_us_p50": 3.0, "latency_us_p99": 4.0, "ratio": null}]"#;
        let points = points_of(record).unwrap();
        assert_eq!(
            (points[0].curve.as_str(), points[0].gb_per_s, points[0].op.as_str()),
            ("ucx", 1.0, "READ")
        );
        for wrong in ["", "[1]", "size,gbps\n1,2\n", "{}"] {
            assert!(points_of(wrong).map_or(true, |points| points.is_empty()), "{wrong}");
        }
    }

    #[test]
    fn curves_are_told_apart_by_file_and_sorted_by_size() {
        let points: Vec<Point> = [row("WRITE", 65536, 3.0), row("WRITE", 4096, 2.0), row("READ", 4096, 1.0)]
            .iter()
            .map(Point::from)
            .collect();
        let found = panels(&[("a".to_owned(), points.clone()), ("b".to_owned(), points)]);
        let titles: Vec<&str> = found.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(
            titles,
            ["WRITE: bandwidth", "READ: bandwidth", "WRITE: median latency", "READ: median latency"]
        );
        let names: Vec<&str> = found[0].curves.iter().map(|curve| curve.name.as_str()).collect();
        assert_eq!(names, ["a tcp imm", "b tcp imm"]);
        assert_eq!(found[0].curves[0].points, [(4096.0, 2.0), (65536.0, 3.0)]);
    }

    #[test]
    fn what_was_not_measured_is_not_drawn() {
        let points = vec![Point { latency_us: 0.0, ..Point::from(&row("WRITE", 4096, 2.0)) }];
        assert_eq!(panels(&[("a".to_owned(), points)]).len(), 1);
        assert_eq!(panels(&[]), []);
    }
}
