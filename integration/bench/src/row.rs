//! One case of one arm of `baton-bench run`: what is written as a line of JSON or CSV.

use serde::{Deserialize, Serialize};

use crate::counts::Counts;
use crate::records::Sample;
use crate::stats::{Summary, median};

const GIB: f64 = (1u64 << 30) as f64;

/// One arm's share of one round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// Iterations of all threads.
    pub iters: u64,
    /// The whole loop, by one timer.
    pub took_s: f64,
    /// CPU time of both processes.
    pub cpu_s: f64,
    /// CPU time of the whole machine.
    pub machine_cpu_s: f64,
    /// The median iteration in microseconds: what others on the machine disturb least.
    pub p50_us: f64,
    /// What both sides did, the initiator first.
    pub counts: [Counts; 2],
}

/// Everything that an arm was measured to do in one case.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// Its rounds, as many as every other arm's.
    pub rounds: Vec<Round>,
    /// Microseconds from the start of an iteration to its end.
    pub latency_us: Vec<f64>,
    /// Microseconds of creating the request or requests of an iteration.
    pub prep_us: Vec<f64>,
    /// Microseconds of the post or posts of an iteration.
    pub post_us: Vec<f64>,
    /// Microseconds from the last post's return until everything was done.
    pub tx_us: Vec<f64>,
    /// First transfers of memory that the engine had not seen.
    pub first_us: Vec<f64>,
}

impl Rounds {
    /// Gigabytes per second of each round, where an iteration moves `bytes`.
    pub fn rates(&self, bytes: u64) -> Vec<f64> {
        let rate = |round: &Round| (round.iters * bytes) as f64 / round.took_s.max(1e-9) / 1e9;
        self.rounds.iter().map(rate).collect()
    }

    /// The same by the median iteration of each round, which a busy machine disturbs less.
    pub fn p50_ratio_to(&self, other: &Rounds) -> Option<f64> {
        let pairs = self.rounds.iter().zip(&other.rounds);
        let ratios: Vec<f64> =
            pairs.filter(|(own, _)| own.p50_us > 0.0).map(|(own, base)| base.p50_us / own.p50_us).collect();
        (!ratios.is_empty()).then(|| median(ratios))
    }

    /// How many times as fast as another arm it was: the median over the rounds, each compared with the other's own.
    pub fn ratio_to(&self, other: &Rounds) -> Option<f64> {
        let pairs = self.rates(1).into_iter().zip(other.rates(1));
        let ratios: Vec<f64> = pairs.filter(|(_, base)| *base > 0.0).map(|(own, base)| own / base).collect();
        (!ratios.is_empty()).then(|| median(ratios))
    }
}

/// One case of one arm. All times are in microseconds, all rates in gigabytes (10⁹ bytes) per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What tells this arm from the others, e.g. `imm`.
    pub arm: String,
    /// `one-sided` or `two-sided`.
    pub backend: String,
    /// What the session ran over.
    pub fabric: String,
    /// `WRITE` or `READ`.
    pub op: String,
    /// `imm`, `send` or `off`.
    pub notify: String,
    /// `once` or `each`.
    pub prepare: String,
    /// `batch`: one request for all blocks of an iteration; `single`: one for each.
    pub transfer: String,
    /// Whether requests came from lists of blocks that both sides keep.
    pub session: bool,
    /// Lanes of the session.
    pub lanes: u64,
    /// Threads that post.
    pub threads: u64,
    /// Iterations that a thread has in flight; 1: stop and wait.
    pub depth: u64,
    /// Bytes of a block.
    pub size_bytes: u64,
    /// Blocks of an iteration.
    pub batch: u64,
    /// Bytes of an iteration.
    pub total_bytes: u64,
    /// Iterations in all.
    pub iters: u64,
    /// Rounds in which the arms took turns.
    pub rounds: u64,
    /// Bytes moved over the time of the whole loop: median over the rounds.
    pub gb_per_s: f64,
    /// The slowest round.
    pub gb_per_s_min: f64,
    /// The fastest round.
    pub gb_per_s_max: f64,
    /// Bytes of an iteration over the shortest latency.
    pub max_bw_gb_per_s: f64,
    /// Bytes of an iteration over the mean latency.
    pub avg_bw_gb_per_s: f64,
    /// Time of the whole loop over the number of blocks: what nixlbench calls the average latency.
    pub block_avg_us: f64,
    /// The shortest iteration.
    pub lat_min_us: f64,
    /// The mean iteration.
    pub lat_avg_us: f64,
    /// The median iteration.
    pub lat_p50_us: f64,
    /// One iteration in a hundred takes longer.
    pub lat_p99_us: f64,
    /// One iteration in a thousand takes longer.
    pub lat_p999_us: f64,
    /// Creating the requests of an iteration, mean.
    pub prep_avg_us: f64,
    /// The same, 99th percentile.
    pub prep_p99_us: f64,
    /// Posting them, mean.
    pub post_avg_us: f64,
    /// The same, 99th percentile.
    pub post_p99_us: f64,
    /// From posted to done, mean.
    pub tx_avg_us: f64,
    /// The same, 99th percentile.
    pub tx_p99_us: f64,
    /// The first transfer of an iteration's blocks here that the engine has never seen, registered first unless the backend takes them
    /// as they are: from the start of that until it is done, median; 0 where it was not measured.
    pub first_p50_us: f64,
    /// CPU seconds of both processes for a GiB.
    pub cpu_s_per_gib: f64,
    /// CPU seconds of the machine for a GiB, with what the kernel did in nobody's name.
    pub machine_cpu_s_per_gib: f64,
    /// Work requests of send queues for an iteration, at the initiator; these and the following are 0 where nothing is counted.
    #[serde(default)]
    pub sends_per_iter: f64,
    /// RECVs posted, at the initiator.
    #[serde(default)]
    pub receives_per_iter: f64,
    /// Calls that handed either to a device, at the initiator.
    #[serde(default)]
    pub doorbells_per_iter: f64,
    /// Entries taken from completion queues, at the initiator.
    #[serde(default)]
    pub completions_per_iter: f64,
    /// Packets that the initiator's ports sent.
    #[serde(default)]
    pub packets_per_iter: f64,
    /// The same at the target.
    #[serde(default)]
    pub target_sends_per_iter: f64,
    /// The same at the target.
    #[serde(default)]
    pub target_receives_per_iter: f64,
    /// The same at the target.
    #[serde(default)]
    pub target_doorbells_per_iter: f64,
    /// The same at the target.
    #[serde(default)]
    pub target_completions_per_iter: f64,
    /// Packets that the target's ports sent.
    #[serde(default)]
    pub target_packets_per_iter: f64,
    /// Speed over that of the first arm, round by round, median; none for that arm itself.
    pub ratio: Option<f64>,
}

impl Row {
    /// Fills what was measured into a row that says what was run: size and batch must be set.
    pub fn measured(mut self, measured: Rounds, first: Option<&Rounds>) -> Row {
        self.total_bytes = self.size_bytes * self.batch;
        self.ratio = first.and_then(|first| measured.ratio_to(first));
        let rates = measured.rates(self.total_bytes);
        self.rounds = rates.len() as u64;
        self.gb_per_s_min = rates.iter().copied().reduce(f64::min).unwrap_or_default();
        self.gb_per_s_max = rates.iter().copied().reduce(f64::max).unwrap_or_default();
        self.gb_per_s = median(rates);
        self.iters = measured.rounds.iter().map(|round| round.iters).sum();
        let sum = |part: fn(&Round) -> f64| measured.rounds.iter().map(part).sum::<f64>();
        let gib = ((self.iters * self.total_bytes) as f64 / GIB).max(1e-12);
        self.block_avg_us = sum(|round| round.took_s) * 1e6 / (self.iters * self.batch).max(1) as f64;
        self.cpu_s_per_gib = sum(|round| round.cpu_s) / gib;
        self.machine_cpu_s_per_gib = sum(|round| round.machine_cpu_s) / gib;
        self.count(&measured.rounds);
        let latency = Summary::of(measured.latency_us);
        let gb_per_s = |us: f64| if us > 0.0 { self.total_bytes as f64 / us / 1e3 } else { 0.0 };
        (self.max_bw_gb_per_s, self.avg_bw_gb_per_s) = (gb_per_s(latency.min), gb_per_s(latency.avg));
        (self.lat_min_us, self.lat_avg_us) = (latency.min, latency.avg);
        (self.lat_p50_us, self.lat_p99_us, self.lat_p999_us) = (latency.p50, latency.p99, latency.p999);
        let (prep, post) = (Summary::of(measured.prep_us), Summary::of(measured.post_us));
        let tx = Summary::of(measured.tx_us);
        (self.prep_avg_us, self.prep_p99_us) = (prep.avg, prep.p99);
        (self.post_avg_us, self.post_p99_us) = (post.avg, post.p99);
        (self.tx_avg_us, self.tx_p99_us) = (tx.avg, tx.p99);
        self.first_p50_us = Summary::of(measured.first_us).p50;
        self.rounded()
    }

    fn count(&mut self, rounds: &[Round]) {
        let iters = self.iters.max(1) as f64;
        let [own, target] =
            [0, 1].map(|side| rounds.iter().fold(Counts::default(), |sum, round| sum + round.counts[side]));
        let each = |count: u64| count as f64 / iters;
        (self.sends_per_iter, self.receives_per_iter) = (each(own.sends), each(own.receives));
        (self.doorbells_per_iter, self.completions_per_iter) = (each(own.doorbells), each(own.completions));
        self.packets_per_iter = each(own.packets);
        (self.target_sends_per_iter, self.target_receives_per_iter) =
            (each(target.sends), each(target.receives));
        (self.target_doorbells_per_iter, self.target_completions_per_iter) =
            (each(target.doorbells), each(target.completions));
        self.target_packets_per_iter = each(target.packets);
    }

    /// With six digits: more are not meaningful, and so many are the same number in every format.
    fn rounded(mut self) -> Row {
        let six = |value: &mut f64| *value = format!("{value:.5e}").parse().unwrap_or(*value);
        [
            &mut self.gb_per_s,
            &mut self.gb_per_s_min,
            &mut self.gb_per_s_max,
            &mut self.max_bw_gb_per_s,
            &mut self.avg_bw_gb_per_s,
            &mut self.block_avg_us,
            &mut self.lat_min_us,
            &mut self.lat_avg_us,
            &mut self.lat_p50_us,
            &mut self.lat_p99_us,
            &mut self.lat_p999_us,
            &mut self.prep_avg_us,
            &mut self.prep_p99_us,
            &mut self.post_avg_us,
            &mut self.post_p99_us,
            &mut self.tx_avg_us,
            &mut self.tx_p99_us,
            &mut self.first_p50_us,
            &mut self.cpu_s_per_gib,
            &mut self.machine_cpu_s_per_gib,
            &mut self.sends_per_iter,
            &mut self.receives_per_iter,
            &mut self.doorbells_per_iter,
            &mut self.completions_per_iter,
            &mut self.packets_per_iter,
            &mut self.target_sends_per_iter,
            &mut self.target_receives_per_iter,
            &mut self.target_doorbells_per_iter,
            &mut self.target_completions_per_iter,
            &mut self.target_packets_per_iter,
        ]
        .into_iter()
        .chain(self.ratio.as_mut())
        .for_each(six);
        self
    }
}

impl From<&Row> for Sample {
    fn from(row: &Row) -> Sample {
        Sample {
            op: row.op.clone(),
            size_bytes: row.size_bytes,
            batch: row.batch,
            gbps: row.gb_per_s * 8.0,
            latency_us_p50: row.lat_p50_us,
            latency_us_p99: row.lat_p99_us,
            latency_us_p999: Some(row.lat_p999_us),
            cpu_s_per_gib: Some(row.cpu_s_per_gib),
            machine_cpu_s_per_gib: Some(row.machine_cpu_s_per_gib),
            ..Sample::default()
        }
    }
}

/// Rows as CSV, with a header.
pub fn rows_to_csv(rows: &[Row]) -> Result<String, String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).map_err(|error| error.to_string())?;
    }
    let bytes = writer.into_inner().map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

/// The reverse of [`rows_to_csv`].
pub fn rows_from_csv(text: &str) -> Result<Vec<Row>, String> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    reader.deserialize().map(|row| row.map_err(|error| error.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seconds: &[f64]) -> Rounds {
        let round = |took: &f64| Round {
            iters: 10,
            took_s: *took,
            cpu_s: 2.0 * took,
            machine_cpu_s: *took,
            p50_us: 5e3 * took,
            counts: [
                Counts { sends: 20, receives: 10, doorbells: 10, completions: 11, packets: 31 },
                Counts { packets: 5, ..Counts::default() },
            ],
        };
        Rounds {
            rounds: seconds.iter().map(round).collect(),
            latency_us: vec![10.0, 20.0, 40.0, 30.0],
            prep_us: vec![1.0, 3.0],
            post_us: vec![0.5],
            tx_us: vec![8.0, 9.0],
            first_us: vec![5.0, 4.0, 6.0],
        }
    }

    fn case() -> Row {
        Row { arm: "imm, \"each\"".to_owned(), size_bytes: 1 << 20, batch: 4, ..Row::default() }
    }

    #[test]
    fn a_row_holds_what_its_rounds_come_to() {
        let row = case().measured(rounds(&[1.0, 0.5, 2.0]), Some(&rounds(&[2.0, 2.0, 2.0])));
        let bytes = f64::from(10 * 4 * (1 << 20));
        assert_eq!((row.rounds, row.iters, row.total_bytes), (3, 30, 4 << 20));
        let near =
            |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 1e-5, "{found}, {wanted}");
        near(row.gb_per_s, bytes / 1e9);
        near(row.gb_per_s_min, bytes / 2e9);
        near(row.gb_per_s_max, bytes / 0.5e9);
        assert_eq!(row.ratio, Some(2.0), "each round with the other arm's own");
        assert_eq!(rounds(&[1.0, 0.5, 2.0]).p50_ratio_to(&rounds(&[3.0, 2.0, 2.0])), Some(3.0));
        assert_eq!(
            (row.lat_min_us, row.lat_avg_us, row.lat_p50_us, row.lat_p99_us),
            (10.0, 25.0, 20.0, 40.0)
        );
        assert_eq!((row.prep_avg_us, row.post_avg_us, row.tx_p99_us, row.first_p50_us), (2.0, 0.5, 9.0, 5.0));
        near(row.max_bw_gb_per_s, f64::from(4 << 20) / 10.0 / 1e3);
        assert_eq!((row.sends_per_iter, row.receives_per_iter, row.doorbells_per_iter), (2.0, 1.0, 1.0));
        assert_eq!(
            (row.completions_per_iter, row.packets_per_iter, row.target_packets_per_iter),
            (1.1, 3.1, 0.5)
        );
        near(row.block_avg_us, 3.5e6 / 120.0);
        near(row.cpu_s_per_gib, 7.0 * GIB / (30.0 * f64::from(4 << 20)));
    }

    #[test]
    fn an_arm_without_time_has_numbers_all_the_same() {
        let row = case().measured(Rounds::default(), None);
        assert_eq!((row.gb_per_s, row.lat_avg_us, row.ratio), (0.0, 0.0, None));
    }

    #[test]
    fn csv_has_a_header_and_gives_the_rows_back() {
        let rows =
            [case().measured(rounds(&[1.0]), None), case().measured(rounds(&[1.0]), Some(&rounds(&[3.0])))];
        let text = rows_to_csv(&rows).unwrap();
        let header = text.lines().next().unwrap();
        assert!(header.starts_with("arm,backend,fabric,op,notify,"), "{header}");
        for column in
            ["gb_per_s", "lat_p50_us", "lat_p99_us", "lat_p999_us", "prep_p99_us", "cpu_s_per_gib", "ratio"]
        {
            assert!(header.split(',').any(|one| one == column), "{column} in {header}");
        }
        assert_eq!(text.lines().count(), 3);
        assert_eq!(rows_from_csv(&text).unwrap(), rows);
    }

    #[test]
    fn rows_from_before_counts_are_read_and_those_without_anything_else_are_not() {
        let mut row = serde_json::to_value(Row::default()).unwrap();
        let fields = row.as_object_mut().unwrap();
        fields.retain(|name, _| !name.ends_with("_per_iter"));
        assert_eq!(serde_json::from_value::<Row>(row.clone()).unwrap(), Row::default());
        row.as_object_mut().unwrap().remove("gb_per_s");
        assert!(serde_json::from_value::<Row>(row).unwrap_err().to_string().contains("gb_per_s"));
    }

    #[test]
    fn json_gives_the_rows_back() {
        let rows = vec![case().measured(rounds(&[1.0]), Some(&rounds(&[3.0])))];
        let text = serde_json::to_string(&rows).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Row>>(&text).unwrap(), rows);
    }
}
