//! Rows as tables for people: nixlbench's columns, those of MORI's benchmark, and ours.

use std::fmt::Write as _;

use crate::row::Row;

/// A set of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Columns {
    /// Those of nixlbench.
    Nixlbench,
    /// Those of MORI's bench_engine.
    BenchEngine,
    /// Percentiles, costs, and how the arms compare.
    Baton,
    /// What an iteration is to the devices of both sides.
    Counts,
}

type Column = (&'static str, fn(&Row) -> String);

/// Three significant digits are what a benchmark is good for.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.01.. => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

const NIXLBENCH: &[Column] = &[
    ("Block Size (B)", |row| row.size_bytes.to_string()),
    ("Batch Size", |row| row.batch.to_string()),
    ("B/W (GB/s)", |row| short(row.gb_per_s)),
    ("Avg Lat. (us)", |row| short(row.block_avg_us)),
    ("Avg Prep (us)", |row| short(row.prep_avg_us)),
    ("P99 Prep (us)", |row| short(row.prep_p99_us)),
    ("Avg Post (us)", |row| short(row.post_avg_us)),
    ("P99 Post (us)", |row| short(row.post_p99_us)),
    ("Avg Tx (us)", |row| short(row.tx_avg_us)),
    ("P99 Tx (us)", |row| short(row.tx_p99_us)),
];

const BENCH_ENGINE: &[Column] = &[
    ("MsgSize (B)", |row| row.size_bytes.to_string()),
    ("BatchSize", |row| row.batch.to_string()),
    ("TotalSize (MB)", |row| short(row.total_bytes as f64 / 1e6)),
    ("Max BW (GB/s)", |row| short(row.max_bw_gb_per_s)),
    ("Avg BW (GB/s)", |row| short(row.avg_bw_gb_per_s)),
    ("Min Lat (us)", |row| short(row.lat_min_us)),
    ("Avg Lat (us)", |row| short(row.lat_avg_us)),
];

const BATON: &[Column] = &[
    ("size (B)", |row| row.size_bytes.to_string()),
    ("batch", |row| row.batch.to_string()),
    ("GB/s", |row| short(row.gb_per_s)),
    ("min..max", |row| format!("{}..{}", short(row.gb_per_s_min), short(row.gb_per_s_max))),
    ("p50 (us)", |row| short(row.lat_p50_us)),
    ("p99 (us)", |row| short(row.lat_p99_us)),
    ("p99.9 (us)", |row| short(row.lat_p999_us)),
    ("post (us)", |row| short(row.post_avg_us)),
    ("prepare (us)", |row| short(row.prep_avg_us)),
    ("first (us)", |row| if row.first_p50_us > 0.0 { short(row.first_p50_us) } else { String::new() }),
    ("CPU s/GiB", |row| short(row.cpu_s_per_gib)),
    ("machine s/GiB", |row| short(row.machine_cpu_s_per_gib)),
    ("ratio", |row| row.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default()),
];

/// "own + the target's".
fn both(own: f64, target: f64) -> String {
    format!("{own:.2} + {target:.2}")
}

const COUNTS: &[Column] = &[
    ("size (B)", |row| row.size_bytes.to_string()),
    ("batch", |row| row.batch.to_string()),
    ("send WRs", |row| both(row.sends_per_iter, row.target_sends_per_iter)),
    ("RECVs", |row| both(row.receives_per_iter, row.target_receives_per_iter)),
    ("doorbells", |row| both(row.doorbells_per_iter, row.target_doorbells_per_iter)),
    ("CQEs", |row| both(row.completions_per_iter, row.target_completions_per_iter)),
    ("packets", |row| both(row.packets_per_iter, row.target_packets_per_iter)),
    ("p50 (us)", |row| short(row.lat_p50_us)),
];

/// Rows below each other, in their order, with one set of columns.
pub fn table_of(rows: &[Row], columns: Columns) -> String {
    let set = match columns {
        Columns::Nixlbench => NIXLBENCH,
        Columns::BenchEngine => BENCH_ENGINE,
        Columns::Baton => BATON,
        Columns::Counts => COUNTS,
    };
    let mut cells = vec![["op".to_owned(), "arm".to_owned()].to_vec()];
    cells[0].extend(set.iter().map(|(name, _)| (*name).to_owned()));
    for row in rows {
        let mut line = vec![row.op.clone(), row.arm.clone()];
        line.extend(set.iter().map(|(_, cell)| cell(row)));
        cells.push(line);
    }
    aligned(&cells)
}

/// Where notifications by different means were measured: how they compare, a line per case. Empty elsewhere.
///
/// `ratio(row, base)` tells how many times as fast as another row a row was: by the whole loop, and by the median iteration.
pub fn ratios(rows: &[Row], ratio: impl Fn(&Row, &Row) -> [Option<f64>; 2]) -> String {
    let case = |row: &Row| (row.op.clone(), row.size_bytes, row.batch);
    let alike = |a: &Row, b: &Row| {
        (case(a), &a.backend, &a.prepare, &a.transfer, a.session, a.lanes)
            == (case(b), &b.backend, &b.prepare, &b.transfer, b.session, b.lanes)
    };
    let backends = rows.iter().any(|row| row.backend != rows[0].backend);
    let head = [
        "op",
        "size (B)",
        "off GB/s",
        "send GB/s",
        "imm GB/s",
        "off us",
        "send us",
        "imm us",
        "imm/send",
        "imm/off",
        "p50 imm/send",
        "p50 imm/off",
    ];
    let mut cells = vec![head.map(str::to_owned).to_vec()];
    for imm in rows.iter().filter(|row| row.notify == "imm") {
        let find = |notify: &str| rows.iter().find(|row| row.notify == notify && alike(row, imm));
        let (off, send) = (find("off"), find("send"));
        if off.is_none() && send.is_none() {
            continue;
        }
        let cell =
            |row: Option<&Row>, value: fn(&Row) -> f64| row.map(|row| short(value(row))).unwrap_or_default();
        let over = |base: Option<&Row>| {
            let both = base.map(|base| ratio(imm, base)).unwrap_or_default();
            both.map(|ratio| ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default())
        };
        let ([send_ratio, send_p50], [off_ratio, off_p50]) = (over(send), over(off));
        let all = [off, send, Some(imm)];
        let op = if backends { format!("{} {}", imm.op, imm.backend) } else { imm.op.clone() };
        let mut line = vec![op, imm.size_bytes.to_string()];
        line.extend(all.map(|row| cell(row, |row| row.gb_per_s)));
        line.extend(all.map(|row| cell(row, |row| row.lat_p50_us)));
        line.extend([send_ratio, off_ratio, send_p50, off_p50]);
        cells.push(line);
    }
    if cells.len() == 1 { String::new() } else { aligned(&cells) }
}

/// Cells in columns as wide as they must be, numbers to the right.
pub(crate) fn aligned(cells: &[Vec<String>]) -> String {
    let columns = cells.first().map(Vec::len).unwrap_or_default();
    assert!(cells.iter().all(|line| line.len() == columns), "as many cells as there are columns");
    let width = |at: usize| cells.iter().map(|line| line[at].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in cells {
        let mut text = String::new();
        for (at, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            let words =
                cells[1..].iter().any(|line| line[at].parse::<f64>().is_err() && !line[at].contains(".."));
            // Writing to a String cannot fail.
            let _ = match words && at < 2 {
                true => write!(text, "{gap}{cell:<width$}"),
                false => write!(text, "{gap}{cell:>width$}"),
            };
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(notify: &str, gb_per_s: f64) -> Row {
        Row {
            arm: notify.to_owned(),
            notify: notify.to_owned(),
            op: "WRITE".to_owned(),
            size_bytes: 4096,
            batch: 8,
            gb_per_s,
            ..Row::default()
        }
    }

    #[test]
    fn the_columns_are_those_that_people_know() {
        let rows = [row("off", 1.5), row("imm", 123.4)];
        let table = table_of(&rows, Columns::Nixlbench);
        for column in
            ["Block Size (B)", "B/W (GB/s)", "Avg Lat. (us)", "P99 Prep (us)", "P99 Post (us)", "P99 Tx (us)"]
        {
            assert!(table.contains(column), "{column} in\n{table}");
        }
        assert!(table.contains("1.50") && table.contains("123"), "{table}");
        assert_eq!(table.lines().count(), 3);
        let table = table_of(&rows, Columns::BenchEngine);
        assert!(table.contains("Max BW (GB/s)") && table.contains("Min Lat (us)"), "{table}");
        let table = table_of(&rows, Columns::Baton);
        assert!(table.contains("p99.9 (us)") && table.contains("CPU s/GiB"), "{table}");
    }

    #[test]
    fn counts_are_those_of_both_sides() {
        let row = Row {
            sends_per_iter: 2.0,
            target_sends_per_iter: 0.06,
            packets_per_iter: 3.06,
            ..row("send", 1.0)
        };
        let table = table_of(&[row], Columns::Counts);
        for text in ["send WRs", "RECVs", "doorbells", "CQEs", "packets", "2.00 + 0.06", "3.06 + 0.00"] {
            assert!(table.contains(text), "{text} in\n{table}");
        }
    }

    #[test]
    fn notifications_are_compared_case_by_case() {
        let rows =
            [row("off", 4.0), row("send", 1.0), row("imm", 2.0), Row { size_bytes: 8192, ..row("imm", 9.0) }];
        let table = ratios(&rows, |own, base| [Some(own.gb_per_s / base.gb_per_s), Some(3.0)]);
        assert_eq!(table.lines().count(), 2, "{table}");
        let line: Vec<&str> = table.lines().last().unwrap_or_default().split_whitespace().collect();
        assert_eq!(line[..5], ["WRITE", "4096", "4.00", "1.00", "2.00"]);
        assert_eq!(line[8..], ["2.00", "0.50", "3.00", "3.00"]);
        assert_eq!(ratios(&rows[2..], |_, _| [Some(1.0); 2]), "");
    }
}
