//! `baton-bench run` as people start it: two processes on the software fabrics, every byte compared by the benchmark
//! itself.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use baton_bench::{Row, rows_from_csv};
use baton_tests::{command, engine_directory, run, scratch, text};

const WATCHDOG: Duration = Duration::from_secs(120);

fn bench(words: &str, more: &[&Path]) -> Output {
    let variables =
        [("BATON_PLUGIN", engine_directory().clone().into_os_string()), ("BATON_PTRACE", "any".into())];
    let mut program = command(env!("CARGO_BIN_EXE_baton-bench"), variables);
    program.args(words.split_whitespace()).args(more);
    run(program, WATCHDOG)
}

fn rows(words: &str) -> Vec<Row> {
    let output = bench(&format!("run {words} --json -"), &[]);
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{words}: {e}\n{}", text(&output.stdout)))
}

fn every_op_and_notification(fabric: &str) {
    let rows = rows(&format!(
        "--fabric {fabric} --sizes 8,4096,65536 --batch 5 --iters 28 --warmup 2 --threads 2 --notify off,send,imm"
    ));
    assert_eq!(rows.len(), 2 * 3 * 3);
    for row in &rows {
        assert_eq!((row.fabric.as_str(), row.iters, row.rounds, row.batch), (fabric, 28, 7, 5), "{row:?}");
        assert!(row.gb_per_s > 0.0 && row.lat_min_us > 0.0, "{row:?}");
        assert!(row.lat_p50_us <= row.lat_p99_us && row.lat_p99_us <= row.lat_p999_us, "{row:?}");
        assert_eq!(row.ratio.is_none(), row.arm == "off", "{row:?}");
    }
    for (op, arm) in [("WRITE", "off"), ("WRITE", "send"), ("READ", "send"), ("READ", "imm")] {
        assert_eq!(rows.iter().filter(|row| (row.op.as_str(), row.arm.as_str()) == (op, arm)).count(), 3);
    }
}

#[test]
fn blocks_cross_by_local_copies_with_every_kind_of_notification() {
    every_op_and_notification("local");
}

#[test]
fn blocks_cross_by_tcp_with_every_kind_of_notification() {
    every_op_and_notification("tcp");
}

#[test]
fn all_ways_to_prepare_and_to_batch_move_the_same_blocks_pipelined() {
    let rows = rows(
        "--fabric tcp --sizes 4096 --batch 6 --iters 24 --rounds 2 --depth 3 --enable-notification --prepare-once \
         --prepare-each --enable-batch-transfer --disable-batch-transfer",
    );
    let arms: Vec<&str> = rows.iter().take(4).map(|row| row.arm.as_str()).collect();
    assert_eq!(arms, ["once batch", "each batch", "once single", "each single"]);
    assert_eq!(rows.len(), 8);
    assert!(rows.iter().all(|row| row.iters == 24 && row.depth == 3 && row.prep_avg_us > 0.0), "{rows:?}");
}

#[test]
fn memory_of_the_engine_s_own_takes_turns_with_the_host_s_and_moves_the_same_blocks() {
    for fabric in ["local", "tcp"] {
        let rows = rows(&format!(
            "--fabric {fabric} --mem managed,dram --sizes 4096,65536 --batch 6 --iters 24 --rounds 2 --threads 2"
        ));
        let arms: Vec<&str> = rows.iter().map(|row| row.arm.as_str()).collect();
        assert_eq!(arms, ["managed", "dram"].repeat(4), "{fabric}");
        assert!(rows.iter().all(|row| row.fabric == fabric && row.iters == 24), "{rows:?}");
    }
}

#[test]
fn the_bare_loop_and_memcpy_move_the_same_blocks_and_come_first_and_last() {
    let rows =
        rows("--fabric local --sizes 4096,24 --batch 5 --iters 16 --rounds 3 --enable-notification --rivals");
    let arms: Vec<&str> = rows.iter().take(5).map(|row| row.arm.as_str()).collect();
    assert_eq!(arms, ["bare", "baton imm", "bare x2", "memcpy", "memcpy x2"]);
    assert_eq!(rows.len(), 2 * 2 * 5);
    for row in &rows {
        assert_eq!((row.iters, row.rounds, row.batch), (18, 3, 5), "{row:?}");
        assert!(row.gb_per_s > 0.0 && row.lat_min_us > 0.0, "{row:?}");
        assert_eq!(row.ratio.is_none(), row.arm == "bare", "{row:?}");
    }
}

#[test]
#[ignore = "needs RDMA devices: run it in the guest"]
fn a_bare_queue_pair_over_rdma_writes_the_same_blocks_with_as_many_work_requests() {
    let devices = std::env::var("RIG_DEVICES").expect("RIG_DEVICES: two devices, separated by a comma");
    let (own, target) = devices.split_once(',').expect("two devices");
    let rows = rows(&format!(
        "--fabric verbs --devices {own} --target-devices {target} --op write --sizes 4096,24 --batch 3 --iters 20 --rounds 2 \
         --warmup 4 --notify off,send,imm --message-bytes 0 --rivals"
    ));
    let arms: Vec<&str> = rows.iter().take(6).map(|row| row.arm.as_str()).collect();
    assert_eq!(arms, ["baton off", "baton send", "baton imm", "qp off", "qp send", "qp imm"]);
    assert_eq!(rows.len(), 12);
    for row in &rows {
        assert_eq!((row.iters, row.rounds, row.batch), (20, 2, 3), "{row:?}");
        // Three WRITEs, and a SEND where it tells; an engine may add WRITEs that announce credit.
        let (wanted, told) = match row.notify.as_str() {
            "off" => (3.0, 0.0),
            "imm" => (3.0, 1.0),
            _ => (4.0, 1.0),
        };
        let credit = if row.backend == "queue pair" { 0.0 } else { 1.0 };
        assert!((wanted..=wanted + credit).contains(&row.sends_per_iter), "{row:?}");
        assert!(row.doorbells_per_iter >= 1.0 && row.packets_per_iter >= wanted, "{row:?}");
        assert!((told..=told + credit).contains(&row.target_completions_per_iter), "{row:?}");
    }
}

#[test]
fn lists_of_blocks_move_the_same_blocks_as_descriptors() {
    let rows = rows(
        "--fabric tcp --sizes 4096 --batch 6 --iters 8 --rounds 2 --prepare-each --prepare-once --enable-sess --disable-sess",
    );
    let arms: Vec<(&str, bool)> = rows.iter().take(4).map(|row| (row.arm.as_str(), row.session)).collect();
    assert_eq!(
        arms,
        [("once no-sess", false), ("each no-sess", false), ("once sess", true), ("each sess", true)]
    );
}

#[test]
fn tables_csv_and_json_hold_the_same_rows_and_progress_is_for_terminals() {
    let directory: PathBuf = scratch("bench-files");
    let (json, csv) = (directory.join("rows.json"), directory.join("rows.csv"));
    let words = "run --fabric tcp --op write --sizes 4096 --batch 2 --iters 7 --notify off,imm --json";
    let output = bench(words, &[&json, Path::new("--csv"), &csv]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    let tables = text(&output.stdout);
    for column in ["B/W (GB/s)", "Max BW (GB/s)", "p99.9 (us)", "imm/off", "every byte compared"] {
        assert!(tables.contains(column), "{column} is not in\n{tables}");
    }
    let rows: Vec<Row> = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows_from_csv(&std::fs::read_to_string(&csv).unwrap()).unwrap(), rows);
}

#[test]
fn bare_notifications_come_in_order_by_both_backends_and_are_sent_back() {
    for fabric in ["local", "tcp"] {
        let words =
            format!("notify --fabric {fabric} --count 700 --pings 60 --message-bytes 300 --runs 2 --json -");
        let output = bench(&words, &[]);
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let records: Vec<baton_bench::FiguresRecord> = serde_json::from_slice(&output.stdout).unwrap();
        let peers: Vec<&str> = records.iter().map(|record| record.peer.as_str()).collect();
        assert_eq!(peers, ["baton one-sided", "baton two-sided"], "{fabric}");
        for record in &records {
            assert_eq!((record.runs, record.case.as_str()), (2, "300 B"), "{record:?}");
            assert!(record.median["ops_per_s"] > 0.0 && record.ratio.is_empty(), "{record:?}");
            assert!(record.median["p50_us"] <= record.median["p99_us"], "{record:?}");
        }
    }
}

/// A rival that takes a thousand seconds for each message, of which its script takes 400.
const SLOW_RIVAL: &str = r#"echo "a line that is no sample"
echo '{"case": "8 B", "ops_per_s": 0.001, "op_us": 1e9, "script_us": 4e8, "net_op_us": 6e8, "p50_us": 1e9, "p99_us": 1e9}'
"#;

#[test]
fn notifications_are_compared_with_what_a_rival_takes_without_its_script() {
    let script = scratch("bench-notify").join("rival.sh");
    std::fs::write(&script, SLOW_RIVAL).unwrap();
    let rival = format!("sh {}", script.display());
    let words =
        "notify --fabric tcp --backend two-sided --count 50 --pings 5 --message-bytes 8 --runs 1 --mooncake";
    let output = bench(words, &[Path::new(&rival)]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(table.contains("reached: baton two-sided has "), "{table}");
    assert!(table.contains("6.0e8..6.0e8") || table.contains("600000000"), "{table}");
}

#[test]
fn what_makes_no_sense_is_refused_by_name_and_nothing_is_opened() {
    for (words, named) in [
        ("run --iters 0", "'--iters <ITERS>': 0 is not in 1..=10000000"),
        ("run --backend two-sided --prepare-once", "--prepare-once: the backend two-sided prepares nothing"),
        ("run --sizes 4096,9", "'--sizes <SIZES>': a multiple of 8"),
        ("peers", "nobody to measure: give --nixl, --mooncake or both"),
        ("peers --runs 0", "'--runs <RUNS>': 0 is not in 1..=100"),
        ("run --json /none-such/file", "--json /none-such/file: it cannot be written"),
        ("run --csv /", "--csv /: it cannot be written"),
        ("plot /nonexist.json", "/nonexist.json: No such file"),
    ] {
        // An engine that does not exist would be the error if one were opened.
        let mut program = command(env!("CARGO_BIN_EXE_baton-bench"), [("BATON_PLUGIN", "/nonexistent")]);
        program.args(words.split_whitespace());
        let output = run(program, WATCHDOG);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(named), "{words}: {said}");
        assert!(!said.contains("/nonexistent"), "{words}: {said}");
    }
}

/// Peers that print what real ones would: Baton is faster with each run, UCX always the same, Mooncake fails.
const FAKE_PEER: &str = r#"
test "$NIXL_TEST_BACKEND" || exit 1
if test $NIXL_TEST_BACKEND = BATON; then echo x >> $0.runs; gbps=$(($(wc -l < $0.runs) * 8)); else gbps=8; fi
echo "a line that is no sample"
echo "{\"op\": \"WRITE\", \"size_bytes\": 64, \"batch\": 2, \"gbps\": $gbps, \"latency_us_p50\": 3, \"latency_us_p99\": 4}"
"#;

#[test]
fn peers_stand_side_by_side_with_ratios_and_one_that_fails_is_missing() {
    let directory = scratch("bench-peers");
    let (script, json) = (directory.join("peer.sh"), directory.join("peers.json"));
    std::fs::write(&script, FAKE_PEER).unwrap();
    let shell = format!("sh {}", script.display());
    let words = ["peers", "--runs", "3", "--op", "write", "--sizes", "64", "--batch", "2"];
    let mut program = command(env!("CARGO_BIN_EXE_baton-bench"), [("LC_ALL", "C")]);
    program.args(words).args(["--nixl", &shell, "--mooncake", &shell, "--json"]).arg(&json);
    let output = run(program, WATCHDOG);
    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors.matches("mooncake-tcp: ").count(), 3, "{errors}");
    assert!(!table.contains("mooncake-tcp  "), "{table}");
    let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some("baton")).unwrap();
    // Runs 1, 3 and 5 of both of Baton's peers are its own; gigabits become gigabytes.
    assert!(line.contains("1.00..5.00") && line.split_whitespace().last() == Some("3.00"), "{table}");
    let records: Vec<baton_bench::Record> =
        serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(records.len(), 4);
}

#[test]
fn curves_of_several_files_become_an_svg_and_a_png() {
    let directory = scratch("bench-plot");
    let files = [directory.join("one.json"), directory.join("two.csv")];
    let row = |arm: &str, size_bytes, gb_per_s| Row {
        arm: arm.to_owned(),
        fabric: "tcp".to_owned(),
        op: "WRITE".to_owned(),
        size_bytes,
        batch: 1,
        gb_per_s,
        lat_p50_us: 9.0,
        ..Row::default()
    };
    let rows = vec![row("imm", 4096, 1.0), row("imm", 8192, 2.0)];
    std::fs::write(&files[0], serde_json::to_string(&rows).unwrap()).unwrap();
    std::fs::write(&files[1], baton_bench::rows_to_csv(&rows).unwrap()).unwrap();
    let out = directory.join("curves");
    let output = bench("plot --out", &[&out, &files[0], &files[1]]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let svg = std::fs::read_to_string(directory.join("curves.svg")).unwrap();
    assert!(svg.contains("one tcp imm") && svg.contains("two tcp imm"), "{svg}");
    assert!(std::fs::read(directory.join("curves.png")).unwrap().starts_with(b"\x89PNG"));
}
