//! Cases that several peers run in turn: medians, ratios, a table, JSON.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::stats::median;

/// One case of one run, as the measuring process prints it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Which run it is of; set by whoever counts them. Peers are compared within a run, whatever became of the others.
    #[serde(skip)]
    pub run: u32,
    /// `WRITE` or `READ`.
    pub op: String,
    /// Bytes of one descriptor.
    pub size_bytes: u64,
    /// Descriptors of one transfer.
    pub batch: u64,
    /// Gigabits per second over the whole loop.
    pub gbps: f64,
    /// Median time from post to done.
    pub latency_us_p50: f64,
    /// The time that one transfer in a hundred exceeds.
    pub latency_us_p99: f64,
    /// The time that one transfer in a thousand exceeds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us_p999: Option<f64>,
    /// Median time that creating a request took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_us_p50: Option<f64>,
    /// Median time that posting one took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_us_p50: Option<f64>,
    /// CPU time of both processes for a GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_s_per_gib: Option<f64>,
    /// CPU time of the whole machine for a GiB, with what the kernel did in nobody's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_cpu_s_per_gib: Option<f64>,
}

/// One case of one peer over all runs: a line of the table and of the JSON list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Who was measured, e.g. `baton-tcp`.
    pub peer: String,
    /// `WRITE` or `READ`.
    pub op: String,
    /// Whether each transfer carried a notification.
    pub notify: bool,
    /// Bytes of one descriptor.
    pub size_bytes: u64,
    /// Descriptors of one transfer.
    pub batch: u64,
    /// Median over the runs, in gigabits per second.
    pub gbps_median: f64,
    /// The slowest run.
    pub gbps_min: f64,
    /// The fastest run.
    pub gbps_max: f64,
    /// Median over the runs of their medians.
    pub latency_us_p50: f64,
    /// Median over the runs of their 99th percentiles.
    pub latency_us_p99: f64,
    /// Median over the runs of their 99.9th percentiles, where they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us_p999: Option<f64>,
    /// Median time that creating a request took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_us_p50: Option<f64>,
    /// Median time that posting one took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_us_p50: Option<f64>,
    /// Median CPU time of both processes for a GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_s_per_gib: Option<f64>,
    /// Median CPU time of the whole machine for a GiB, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_cpu_s_per_gib: Option<f64>,
    /// Throughput over that of the peer it is compared with; absent for that peer itself.
    pub ratio: Option<f64>,
}

/// Somebody to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name in the records.
    pub name: &'static str,
    /// The peer its throughput is divided by.
    pub against: Option<&'static str>,
}

/// Condenses the samples of all runs, a list per peer, to one record per peer and case in the order of first
/// appearance.
pub fn condense(measured: &[(Peer, Vec<Sample>)], notify: bool) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    for (peer, samples) in measured {
        let mut seen: Vec<(&str, u64)> = Vec::new();
        for sample in samples {
            let case = (sample.op.as_str(), sample.size_bytes);
            if seen.contains(&case) {
                continue;
            }
            seen.push(case);
            let runs: Vec<&Sample> =
                samples.iter().filter(|other| (other.op.as_str(), other.size_bytes) == case).collect();
            let rates = || runs.iter().map(|run| run.gbps);
            let some = |value: fn(&Sample) -> Option<f64>| {
                let all: Vec<f64> = runs.iter().filter_map(|run| value(run)).collect();
                (!all.is_empty()).then(|| median(all))
            };
            records.push(Record {
                peer: peer.name.to_owned(),
                op: sample.op.clone(),
                notify,
                size_bytes: sample.size_bytes,
                batch: sample.batch,
                gbps_median: median(rates()),
                gbps_min: rates().fold(f64::INFINITY, f64::min),
                gbps_max: rates().fold(0.0, f64::max),
                latency_us_p50: median(runs.iter().map(|run| run.latency_us_p50)),
                latency_us_p99: median(runs.iter().map(|run| run.latency_us_p99)),
                latency_us_p999: some(|run| run.latency_us_p999),
                prepare_us_p50: some(|run| run.prepare_us_p50),
                post_us_p50: some(|run| run.post_us_p50),
                cpu_s_per_gib: some(|run| run.cpu_s_per_gib),
                machine_cpu_s_per_gib: some(|run| run.machine_cpu_s_per_gib),
                ratio: None,
            });
        }
    }
    fill_ratios(measured, &mut records);
    records
}

fn fill_ratios(measured: &[(Peer, Vec<Sample>)], records: &mut [Record]) {
    let base = records.to_vec();
    for record in records {
        let against =
            measured.iter().find(|(peer, _)| peer.name == record.peer).and_then(|(peer, _)| peer.against);
        let other = base.iter().find(|other| {
            Some(other.peer.as_str()) == against
                && (&other.op, other.size_bytes) == (&record.op, record.size_bytes)
        });
        record.ratio =
            other.filter(|other| other.gbps_median > 0.0).map(|other| record.gbps_median / other.gbps_median);
    }
}

/// The records as a table for people, case by case with the peers below each other.
pub fn table(records: &[Record]) -> String {
    // Emulated devices move megabytes.
    let slow = records.iter().all(|record| record.gbps_max < 8.0);
    let (unit, bytes_per_bit) = if slow { ("MB/s", 1000.0 / 8.0) } else { ("GB/s", 1.0 / 8.0) };
    let mut out = format!(
        "{:<6} {:>9} {:<10} {unit:>9} {:>19} {:>10} {:>10} {:>10} {:>7}\n",
        "op", "bytes", "peer", "min to max", "p50 us", "p99 us", "CPU s/GiB", "ratio"
    );
    let mut cases: Vec<(u64, &str)> =
        records.iter().map(|record| (record.size_bytes, record.op.as_str())).collect();
    cases.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(a.1)));
    cases.dedup();
    for (size, op) in cases {
        for record in records.iter().filter(|record| (record.size_bytes, record.op.as_str()) == (size, op)) {
            let ratio = record.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
            let cpu = record.machine_cpu_s_per_gib.map_or_else(String::new, |cpu| format!("{cpu:.1}"));
            let bytes = |gbps: f64| gbps * bytes_per_bit;
            let span = format!("{:.2} to {:.2}", bytes(record.gbps_min), bytes(record.gbps_max));
            // Writing to a String cannot fail.
            let _ = writeln!(
                out,
                "{op:<6} {size:>9} {:<10} {:>9.2} {span:>19} {:>10.0} {:>10.0} {cpu:>10} {ratio:>7}",
                record.peer,
                bytes(record.gbps_median),
                record.latency_us_p50,
                record.latency_us_p99,
            );
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(gbps: f64) -> Sample {
        Sample {
            op: "READ".to_owned(),
            size_bytes: 4096,
            batch: 128,
            gbps,
            latency_us_p50: 10.0,
            latency_us_p99: 20.0,
            machine_cpu_s_per_gib: Some(gbps),
            ..Sample::default()
        }
    }

    #[test]
    fn runs_become_one_record_with_a_ratio_to_its_rival() {
        let ours = Peer { name: "ours", against: Some("theirs") };
        let theirs = Peer { name: "theirs", against: None };
        let measured = [
            (ours, vec![sample(30.0), sample(10.0), sample(20.0)]),
            (theirs, vec![sample(10.0), sample(12.0), sample(8.0)]),
        ];
        let records = condense(&measured, true);
        assert_eq!(records.len(), 2);
        assert_eq!((records[0].gbps_min, records[0].gbps_median, records[0].gbps_max), (10.0, 20.0, 30.0));
        assert_eq!(records[0].ratio, Some(2.0));
        assert_eq!(records[1].ratio, None);
        let table = table(&records);
        assert_eq!(table.lines().count(), 3);
        assert!(table.contains("2.50") && table.contains("2.00"), "{table}");
    }
}
