//! Peers side by side in one table, with a column for everybody that others are compared with.

use std::collections::BTreeMap;

use crate::columns::{aligned, short};
use crate::records::{Peer, Record, Sample};
use crate::stats::median;

/// Who is to be divided by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rivalry {
    /// Whose number is above the line.
    pub ours: &'static str,
    /// Whose is below it.
    pub theirs: &'static str,
}

/// Throughput of one peer over another's in one case: run by run, since they took turns, and then the median. A run that only
/// one of them finished says nothing.
fn ratio(measured: &[(Peer, Vec<Sample>)], rivalry: Rivalry, case: (&str, u64)) -> Option<f64> {
    let runs = |name: &str| {
        let samples = measured.iter().find(|(peer, _)| peer.name == name).map(|(_, samples)| &samples[..]);
        let of_case = |sample: &&Sample| (sample.op.as_str(), sample.size_bytes) == case;
        let rates =
            samples.unwrap_or_default().iter().filter(of_case).map(|sample| (sample.run, sample.gbps));
        rates.collect::<BTreeMap<u32, f64>>()
    };
    let theirs = runs(rivalry.theirs);
    let paired = |(run, ours)| theirs.get(&run).filter(|rate| **rate > 0.0).map(|theirs| ours / theirs);
    let ratios: Vec<f64> = runs(rivalry.ours).into_iter().filter_map(paired).collect();
    (!ratios.is_empty()).then(|| median(ratios))
}

/// The table: case by case with the peers below each other.
pub fn side_by_side(measured: &[(Peer, Vec<Sample>)], records: &[Record], rivalries: &[Rivalry]) -> String {
    let mut rivals: Vec<&str> = Vec::new();
    for rivalry in rivalries.iter().filter(|one| measured.iter().any(|(peer, _)| peer.name == one.theirs)) {
        if !rivals.contains(&rivalry.theirs) {
            rivals.push(rivalry.theirs);
        }
    }
    let fixed = [
        "op",
        "peer",
        "bytes",
        "GB/s",
        "min..max",
        "p50 us",
        "p99 us",
        "create us",
        "post us",
        "CPU s/GiB",
        "machine s/GiB",
    ];
    let mut head: Vec<String> = fixed.map(str::to_owned).to_vec();
    head.extend(rivals.iter().map(|rival| format!("x {rival}")));
    let mut cells = vec![head];
    let mut cases: Vec<(u64, &str)> =
        records.iter().map(|record| (record.size_bytes, record.op.as_str())).collect();
    cases.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(a.1)));
    cases.dedup();
    for (size, op) in cases {
        for record in records.iter().filter(|record| (record.size_bytes, record.op.as_str()) == (size, op)) {
            let some = |value: Option<f64>| value.map(short).unwrap_or_default();
            let gb_per_s = |gbps: f64| short(gbps / 8.0);
            let mut line = vec![
                op.to_owned(),
                record.peer.clone(),
                size.to_string(),
                gb_per_s(record.gbps_median),
                format!("{}..{}", gb_per_s(record.gbps_min), gb_per_s(record.gbps_max)),
                short(record.latency_us_p50),
                short(record.latency_us_p99),
                some(record.prepare_us_p50),
                some(record.post_us_p50),
                some(record.cpu_s_per_gib),
                some(record.machine_cpu_s_per_gib),
            ];
            line.extend(rivals.iter().map(|rival| {
                let rivalry = rivalries.iter().find(|one| one.ours == record.peer && one.theirs == *rival);
                let ratio = rivalry.and_then(|rivalry| ratio(measured, *rivalry, (op, size)));
                ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default()
            }));
            cells.push(line);
        }
    }
    aligned(&cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::condense;

    fn peer(name: &'static str, against: Option<&'static str>) -> Peer {
        Peer { name, against }
    }

    /// Of runs by number.
    fn samples(rates: &[(u32, f64)]) -> Vec<Sample> {
        let sample = |&(run, gbps)| Sample {
            run,
            op: "WRITE".to_owned(),
            size_bytes: 4096,
            batch: 1,
            gbps,
            ..Sample::default()
        };
        rates.iter().map(sample).collect()
    }

    #[test]
    fn a_run_that_one_of_them_did_not_finish_does_not_pair_the_later_ones_wrongly() {
        let measured = [
            (peer("ours", Some("theirs")), samples(&[(0, 10.0), (2, 30.0), (3, 40.0)])),
            (peer("theirs", None), samples(&[(1, 1.0), (2, 15.0), (3, 20.0)])),
        ];
        assert_eq!(ratio(&measured, Rivalry { ours: "ours", theirs: "theirs" }, ("WRITE", 4096)), Some(2.0));
        let strangers = [
            (peer("ours", Some("theirs")), samples(&[(0, 10.0)])),
            (peer("theirs", None), samples(&[(1, 1.0)])),
        ];
        assert_eq!(ratio(&strangers, Rivalry { ours: "ours", theirs: "theirs" }, ("WRITE", 4096)), None);
    }

    #[test]
    fn every_rival_has_a_column_and_runs_are_compared_pair_by_pair() {
        let samples = |rates: [f64; 3]| samples(&[0, 1, 2].map(|run| (run, rates[run as usize])));
        let measured = [
            (peer("ours", Some("theirs")), samples([10.0, 80.0, 30.0])),
            (peer("theirs", None), samples([5.0, 8.0, 30.0])),
            (peer("others", None), samples([1.0, 1.0, 1.0])),
        ];
        let records = condense(&measured, true);
        let rivalries = [
            Rivalry { ours: "ours", theirs: "theirs" },
            Rivalry { ours: "ours", theirs: "others" },
            Rivalry { ours: "ours", theirs: "absent" },
        ];
        let table = side_by_side(&measured, &records, &rivalries);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].ends_with("x theirs  x others"), "{table}");
        let words: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(words[..3], ["WRITE", "ours", "4096"]);
        assert_eq!(words[words.len() - 2..], ["2.00", "30.00"], "{table}");
    }
}
