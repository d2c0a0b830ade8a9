use clap::Parser;

use super::*;
use crate::Cli;

fn parse(words: &str) -> Outcome<Options> {
    let all = ["baton-bench", "run"].into_iter().chain(words.split_whitespace());
    match Cli::try_parse_from(all).map_err(|error| error.to_string())? {
        Cli::Run(options) => Ok(*options),
        _ => Err("not a run".to_owned()),
    }
}

fn plan(words: &str) -> Outcome<Plan> {
    Plan::new(&parse(words)?, 8 << 30)
}

/// The refusal names the option and what would be right.
fn refused(words: &str, named: &[&str]) {
    let reason = match plan(words) {
        Ok(plan) => panic!("{words}: accepted, {plan:?}"),
        Err(reason) => reason,
    };
    for part in named {
        assert!(reason.contains(part), "{words}: {part:?} is not in {reason:?}");
    }
}

#[test]
fn zero_odd_and_absurd_values_are_refused_by_name_with_the_limit() {
    refused("--iters 0", &["--iters", "1..=10000000"]);
    refused("--iters 99999999999", &["--iters", "1..=10000000"]);
    refused("--iters=-1", &["--iters"]);
    refused("--iters 1.5", &["--iters"]);
    refused("--warmup 99999999999", &["--warmup", "0..=10000000"]);
    refused("--batch 0", &["--batch", "1..=1048576"]);
    refused("--batch 1048577", &["--batch", "1..=1048576"]);
    refused("--threads 0", &["--threads", "1..=64"]);
    refused("--threads 65", &["--threads", "1..=64"]);
    refused("--depth 0", &["--depth", "1..=1024"]);
    refused("--lanes 0", &["--lanes", "1..=64"]);
    refused("--lanes 65", &["--lanes", "1..=64"]);
    refused("--rounds 0", &["--rounds", "1..=1000"]);
    refused("--requests 0", &["--requests", "1..=65536"]);
    refused("--mib 0", &["--mib", "1..=1048576"]);
    refused("--first 0", &["--first", "1..=10000"]);
    refused("--patience 0", &["--patience", "1..=86400"]);
    refused("--message-bytes 8388609", &["--message-bytes", "0..=8388608"]);
    refused("--look-us 1000001", &["--look-us", "0..=1000000"]);
    for size in ["0", "4097", "-8", "8.0", "4294967304", "1e3", "many"] {
        refused(&format!("--sizes={size}"), &["--sizes", "a multiple of 8 from 8 to 4294967296"]);
    }
    refused("--sizes 4096,7", &["--sizes", "7"]);
    refused("--check=maybe", &["--check", "maybe"]);
}

#[test]
fn what_does_not_exist_is_refused_with_what_does() {
    refused("--backend none", &["--backend", "one-sided, two-sided, auto"]);
    refused("--backend two-sided --prepare-once", &["--prepare-once", "two-sided prepares nothing"]);
    refused("--backend auto,two-sided --prepare-once", &["--prepare-once", "two-sided prepares nothing"]);
    refused("--mem vram", &["--mem vram", "dram"]);
    refused("--mem disk", &["--mem", "dram, managed, vram"]);
    refused("--op append", &["--op", "write, read"]);
    refused("--notify maybe", &["--notify", "off, imm, send"]);
    refused("--fabric udp", &["--fabric udp", "verbs, local and tcp"]);
    refused("--columns all", &["--columns", "nixlbench, bench-engine, baton, counts"]);
}

#[test]
fn contradictions_are_refused() {
    refused("--enable-notification --notify off", &["--enable-notification", "--notify off"]);
    refused("--enable-notification --notify imm,off", &["--enable-notification", "--notify off"]);
    refused("--fabric tcp --lanes 4", &["--lanes 4", "tcp", "verbs"]);
    refused("--all --sizes 8", &["--all", "--sizes"]);
    refused("--seed-table --notify imm", &["--seed-table", "--notify"]);
    refused("--seed-table --all", &["--seed-table", "--all"]);
    refused("--iters 3 --rounds 7", &["--iters 3", "--rounds 7"]);
    refused("--iters 3 --threads 4", &["--iters 3", "--threads 4"]);
    refused("--rivals --threads 2", &["--rivals", "--threads 2", "one iteration after the other"]);
    refused("--rivals --depth 2", &["--rivals", "--depth 2"]);
    refused("--rivals --target-command ssh", &["--rivals", "--target-command", "on this machine"]);
    refused("--rivals --fabric verbs", &["--rivals over verbs", "--op read"]);
    refused("--requests 2 --depth 4", &["--requests 2", "--depth 4"]);
    refused("--set notify=send", &["--set notify", "--notify"]);
    refused("--set verbose", &["--set", "NAME=VALUE"]);
    refused("--json out --csv out", &["--json", "--csv"]);
}

#[test]
fn memory_that_is_not_there_is_refused_before_it_is_taken() {
    refused("--sizes 4294967296", &["--sizes 4294967296", "MiB are the limit"]);
    refused("--sizes 1048576 --batch 1048576", &["--batch 1048576", "MiB are the limit"]);
    refused("--sizes 65536 --requests 65536", &["--requests 65536", "MiB are the limit"]);
}

#[test]
fn kinds_of_memory_take_turns_each_with_an_engine_of_its_own() {
    let plan = plan("--mem dram,managed --notify off,imm").unwrap();
    let labels: Vec<_> = plan.arms.iter().map(|arm| plan.label(*arm)).collect();
    assert_eq!(labels, ["off dram", "imm dram", "off managed", "imm managed"]);
    let managed: Vec<_> = plan.arms.iter().map(|arm| plan.setups[arm.engine].managed).collect();
    assert_eq!(managed, [false, false, true, true]);
    assert_eq!((plan.setups.len(), plan.pools()), (2, 2));
}

#[test]
fn without_options_one_arm_runs_without_notifications() {
    let plan = plan("").unwrap();
    assert_eq!(plan.arms.len(), 1);
    let arm = plan.arms[0];
    assert!(arm.notify == Notify::Off && arm.prepared && arm.batched && !arm.session);
    assert_eq!(plan.label(arm), "off");
    assert_eq!((plan.cases.len(), plan.setups.len()), (6, 1));
    assert!(!plan.listens());
}

#[test]
fn arms_are_all_combinations_and_share_engines_where_they_can() {
    let all = plan(
        "--notify off,imm,send --prepare-once --prepare-each --enable-batch-transfer --disable-batch-transfer --lanes 1,4",
    )
    .unwrap();
    assert_eq!(all.arms.len(), 24);
    assert_eq!(all.setups.len(), 4, "imm serves off, for each number of lanes");
    assert!(all.listens());
    let labels: Vec<String> = all.arms.iter().map(|arm| all.label(*arm)).collect();
    assert_eq!(labels[0], "off once batch lanes=1");
    assert_eq!(labels[23], "send each single lanes=4");
    let twice = plan("--notify imm,imm").unwrap();
    assert_eq!(twice.arms.len(), 1);
}

#[test]
fn only_what_differs_is_in_an_arms_name() {
    let plan = plan("--enable-notification --prepare-once --prepare-each").unwrap();
    let labels: Vec<String> = plan.arms.iter().map(|arm| plan.label(*arm)).collect();
    assert_eq!(labels, ["once", "each"]);
    let plan = self::plan("--enable-sess --disable-sess").unwrap();
    let labels: Vec<String> = plan.arms.iter().map(|arm| plan.label(*arm)).collect();
    assert_eq!(labels, ["no-sess", "sess"]);
}

#[test]
fn sweeps_double() {
    let sizes = |words: &str| plan(words).unwrap().cases.iter().map(|case| case.size).collect::<Vec<_>>();
    let all = sizes("--all --op read");
    assert_eq!((all.len(), all[0], all[17]), (18, 8, 1 << 20));
    let batches: Vec<u64> = plan("--all-batch --batch 12 --sizes 64 --op read")
        .unwrap()
        .cases
        .iter()
        .map(|case| case.batch)
        .collect();
    assert_eq!(batches, [1, 2, 4, 8, 12]);
}

#[test]
fn the_seed_table_compares_off_send_and_imm_from_1_kib_to_1_mib() {
    let plan = plan("--seed-table").unwrap();
    let words: Vec<&str> = plan.arms.iter().map(|arm| arm.notify.word()).collect();
    assert_eq!(words, ["off", "send", "imm"]);
    assert_eq!(plan.cases.len(), 11);
    assert_eq!(plan.cases[0], Case { op: OpWord::Write, size: 1024, batch: 1 });
    assert_eq!(plan.cases[10].size, 1 << 20);
    assert_eq!((parse("--seed-table").unwrap().message_bytes, parse("").unwrap().message_bytes), (0, 16));
    assert_eq!(self::plan("--seed-table --batch 8 --op read").unwrap().cases[0].batch, 8);
    let options = parse("--seed-table").unwrap();
    let loops = |case: usize| plan.loops(&options, plan.cases[case]).unwrap();
    assert_eq!((loops(2).rounds, loops(2).iters), (15, 3000), "4 KiB");
    assert_eq!((loops(10).rounds, loops(10).iters), (15, 18), "1 MiB: as much as --mib says");
    let some = self::plan("--seed-table --sizes 4096,8192").unwrap().cases;
    assert_eq!(some.iter().map(|case| case.size).collect::<Vec<_>>(), [4096, 8192]);
}

#[test]
fn iterations_are_shared_by_rounds_and_threads() {
    let loops = |words: &str| {
        let options = parse(words).unwrap();
        let plan = Plan::new(&options, 8 << 30).unwrap();
        plan.loops(&options, plan.cases[0]).unwrap()
    };
    let seven = loops("--iters 700 --sizes 64");
    assert_eq!((seven.rounds, seven.iters, seven.warmup), (7, 100, 10));
    let threads = loops("--iters 700 --sizes 64 --threads 2 --rounds 5 --warmup 0");
    assert_eq!((threads.rounds, threads.iters, threads.warmup), (5, 70, 0));
    let few = loops("--iters 3 --sizes 64");
    assert_eq!((few.rounds, few.iters), (3, 1), "fewer rounds rather than none that counts");
    let budget = loops("--mib 64 --sizes 1048576 --batch 1");
    assert_eq!(budget.rounds * budget.iters, 70, "rounded up to whole rounds");
    assert_eq!(loops("--sizes 8 --batch 1").requests, 16);
    assert_eq!(loops("--sizes 8 --batch 1 --depth 20").requests, 20);
}
