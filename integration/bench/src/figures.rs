//! Benchmarks that measure several things at once: figures by name, case by case, peers in turn.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::columns::{aligned, short};
use crate::records::Peer;
use crate::stats::median;

/// One case of one run, as the measuring process prints it: `{"case": "WRITE", "post_ms": 3.2, …}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// What was measured, e.g. `WRITE`.
    pub case: String,
    /// The numbers, by name; a name ends with its unit.
    #[serde(flatten)]
    pub values: BTreeMap<String, f64>,
}

/// One case of one peer over all runs: a line of the table and of the JSON list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FiguresRecord {
    /// Who was measured, e.g. `baton-tcp`.
    pub peer: String,
    /// What was measured.
    pub case: String,
    /// How often.
    pub runs: usize,
    /// Medians over the runs.
    pub median: BTreeMap<String, f64>,
    /// The smallest of every figure.
    pub min: BTreeMap<String, f64>,
    /// The largest.
    pub max: BTreeMap<String, f64>,
    /// How many times smaller some figures are than those of the peer it is compared with: run by run, since they took
    /// turns, and then the median. Empty for that peer itself.
    pub ratio: BTreeMap<String, f64>,
}

/// Condenses the runs of all peers to one record per case and peer, cases in the order of first appearance. `compared`:
/// the figures that ratios are wanted of.
pub fn condense_figures(measured: &[(Peer, Vec<Figures>)], compared: &[&str]) -> Vec<FiguresRecord> {
    let mut cases: Vec<&str> = Vec::new();
    for figures in measured.iter().flat_map(|(_, runs)| runs) {
        if !cases.contains(&figures.case.as_str()) {
            cases.push(&figures.case);
        }
    }
    let mut records = Vec::new();
    for case in cases {
        let of_case =
            |runs: &'_ [Figures]| runs.iter().filter(|run| run.case == case).cloned().collect::<Vec<_>>();
        for (peer, runs) in measured {
            let runs = of_case(runs);
            let Some(first) = runs.first() else { continue };
            let over = |fold: fn(Vec<f64>) -> f64| {
                let all =
                    |name: &String| runs.iter().filter_map(|run| run.values.get(name).copied()).collect();
                first.values.keys().map(|name| (name.clone(), fold(all(name)))).collect::<BTreeMap<_, _>>()
            };
            let theirs = measured.iter().find(|(other, _)| Some(other.name) == peer.against);
            let theirs = theirs.map(|(_, runs)| of_case(runs)).unwrap_or_default();
            let ratios =
                compared.iter().filter_map(|name| Some(((*name).to_owned(), ratio(&runs, &theirs, name)?)));
            records.push(FiguresRecord {
                peer: peer.name.to_owned(),
                case: case.to_owned(),
                runs: runs.len(),
                median: over(median),
                min: over(|all| all.into_iter().fold(f64::INFINITY, f64::min)),
                max: over(|all| all.into_iter().fold(f64::NEG_INFINITY, f64::max)),
                ratio: ratios.collect(),
            });
        }
    }
    records
}

fn ratio(ours: &[Figures], theirs: &[Figures], name: &str) -> Option<f64> {
    let pairs = ours.iter().zip(theirs).filter_map(|(ours, theirs)| {
        let (ours, theirs) = (ours.values.get(name)?, theirs.values.get(name)?);
        (*ours > 0.0).then(|| theirs / ours)
    });
    let all: Vec<f64> = pairs.collect();
    (!all.is_empty()).then(|| median(all))
}

/// A figure's name as words of a heading: `post_ms` is `post ms`.
fn words(name: &str) -> String {
    name.replace('_', " ")
}

/// The table: case by case with the peers below each other; `columns` are names of figures, in their order.
pub fn table_of_figures(records: &[FiguresRecord], columns: &[&str], compared: &[&str]) -> String {
    let mut head = vec!["case".to_owned(), "peer".to_owned()];
    head.extend(columns.iter().map(|name| words(name)));
    head.extend(
        compared.iter().flat_map(|name| [format!("{} min..max", words(name)), format!("x {}", words(name))]),
    );
    let mut cells = vec![head];
    for record in records {
        let of = |map: &BTreeMap<String, f64>, name: &str| {
            map.get(name).map(|value| short(*value)).unwrap_or_default()
        };
        let mut line = vec![record.case.clone(), record.peer.clone()];
        line.extend(columns.iter().map(|name| of(&record.median, name)));
        for name in compared {
            line.push(format!("{}..{}", of(&record.min, name), of(&record.max, name)));
            line.push(record.ratio.get(*name).map(|ratio| format!("{ratio:.2}")).unwrap_or_default());
        }
        cells.push(line);
    }
    aligned(&cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(case: &str, post: f64, done: f64) -> Figures {
        serde_json::from_str(&format!(r#"{{"case": "{case}", "post_ms": {post}, "done_ms": {done}}}"#))
            .unwrap()
    }

    #[test]
    fn runs_become_medians_and_ratios_run_by_run() {
        let measured = [
            (
                Peer { name: "ours", against: Some("theirs") },
                vec![
                    run("WRITE", 1.0, 10.0),
                    run("READ", 2.0, 7.0),
                    run("WRITE", 3.0, 20.0),
                    run("WRITE", 2.0, 5.0),
                ],
            ),
            (
                Peer { name: "theirs", against: None },
                vec![run("WRITE", 9.0, 100.0), run("WRITE", 9.0, 20.0), run("WRITE", 9.0, 30.0)],
            ),
        ];
        let records = condense_figures(&measured, &["done_ms"]);
        let found: Vec<_> =
            records.iter().map(|record| (&*record.case, &*record.peer, record.runs)).collect();
        assert_eq!(found, [("WRITE", "ours", 3), ("WRITE", "theirs", 3), ("READ", "ours", 1)]);
        assert_eq!((records[0].median["post_ms"], records[0].median["done_ms"]), (2.0, 10.0));
        assert_eq!((records[0].min["done_ms"], records[0].max["done_ms"]), (5.0, 20.0));
        assert_eq!(records[0].ratio["done_ms"], 6.0, "of 10, 1 and 6");
        assert!(records[0].ratio.len() == 1 && records[1].ratio.is_empty() && records[2].ratio.is_empty());
        let table = table_of_figures(&records, &["post_ms", "done_ms"], &["done_ms"]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].contains("post ms") && lines[0].ends_with("x done ms"), "{table}");
        assert!(lines[1].contains("5.00..20.0") && lines[1].ends_with("6.00"), "{table}");
        let text = serde_json::to_string(&records).unwrap();
        assert_eq!(serde_json::from_str::<Vec<FiguresRecord>>(&text).unwrap(), records);
    }
}
