//! The two-sided backend holds under many seeds, and the checkers would notice if it did not.

use baton_fabric_sim::Sabotage;
use baton_sim::two_sided::{TwoReached, run};
use baton_sim::{Faults, Neglect, Options};

/// Unoptimised code is slow; `baton-sim --two-sided` runs as many as anybody likes.
const SEEDS: u64 = if cfg!(debug_assertions) { 40 } else { 200 };

fn break_no_rule(seeds: std::ops::Range<u64>) {
    let (mut reached, mut epochs, count) = (TwoReached::default(), 0, seeds.end - seeds.start);
    for seed in seeds {
        match run(seed, Options::default()) {
            Ok(report) => {
                reached = reached.plus(&report.reached);
                epochs += report.epochs;
            }
            Err(failure) => panic!("{failure}\nreplay with: baton-sim --two-sided --replay {seed}"),
        }
    }
    // A swarm that never gets there proves nothing.
    for (name, n) in reached.named() {
        assert!(n > 0, "{count} seeds reached no {name}");
    }
    assert!(epochs > 4 * count, "epochs were dropped and begun anew: {epochs}");
}

#[test]
fn random_work_over_shared_pools_and_random_faults_break_no_rule() {
    break_no_rule(0..SEEDS);
}

#[test]
#[ignore = "takes minutes: cargo xtask test --long"]
fn nor_do_two_thousand_seeds() {
    break_no_rule(10_000..12_000);
}

#[test]
fn without_faults_an_epoch_lasts() {
    for seed in 1000..1000 + SEEDS / 2 {
        let report = run(seed, Options { faults: Faults::None, ..Options::default() })
            .unwrap_or_else(|e| panic!("{e}"));
        assert!(report.epochs <= 6, "seed {seed}: {} epochs", report.epochs);
    }
}

#[test]
fn a_seed_replays_bit_by_bit() {
    for seed in [3, 77, 1234] {
        assert_eq!(run(seed, Options::default()), run(seed, Options::default()), "seed {seed}");
    }
    let digests = [4, 5].map(|seed| run(seed, Options::default()).map(|report| report.digest));
    assert_ne!(digests[0], digests[1]);
}

#[test]
fn what_the_network_breaks_is_noticed() {
    for sabotage in [Sabotage::WrongByte, Sabotage::LostCompletion, Sabotage::RepeatedImmediate] {
        let options = Options { faults: Faults::None, sabotage: Some(sabotage), ..Options::default() };
        let noticed = (0..200).find_map(|seed| run(seed, options).err());
        assert!(noticed.is_some(), "200 seeds did not notice {sabotage:?}");
    }
}

/// Where nothing but deaths happens, an epoch that ends on a link between two living nodes is a failure of the run.
#[test]
fn the_death_of_a_node_disturbs_no_other_link() {
    let mut reached = TwoReached::default();
    let faults = Faults::Deaths;
    for seed in 2000..2000 + SEEDS {
        let report = run(seed, Options { faults, ..Options::default() }).unwrap_or_else(|e| panic!("{e}"));
        reached = reached.plus(&report.reached);
        // At most six links at first, three more with each node that comes back.
        assert!(report.epochs <= 6 + 3 * report.reached.nodes_restarted, "seed {seed}: {report:?}");
    }
    assert!(reached.nodes_killed > SEEDS / 10 && reached.nodes_restarted > SEEDS / 20, "{reached:?}");
    assert!(reached.transfers_orphaned > 0 && reached.notes_orphaned > 0, "{reached:?}");
}

#[test]
fn what_a_survivor_forgets_is_noticed() {
    for (neglect, words) in [
        (Neglect::Transfers, "was not reported with its session"),
        (Neglect::TransfersTwice, "is reported twice"),
        (Neglect::Notifications, "was not resolved with its session"),
        (Neglect::Copies, "although nobody owned it"),
        (Neglect::Memory, "registrations at rest"),
        (Neglect::Session, ""),
    ] {
        let options = Options { faults: Faults::Deaths, neglect: Some(neglect), ..Options::default() };
        let noticed = (0..400).find_map(|seed| run(seed, options).err());
        let noticed = noticed.unwrap_or_else(|| panic!("400 seeds did not notice {neglect:?}"));
        assert!(noticed.what.contains(words), "{neglect:?}: {noticed}");
    }
}

/// Rests of messages whose head was received: those that did not come were not placed, and those that were given up go nowhere.
#[test]
fn a_driver_that_lies_about_rests_is_noticed() {
    for (neglect, words) in
        [(Neglect::RestsTold, "bytes are missing"), (Neglect::RestsLate, "although nobody owned it")]
    {
        let options = Options { neglect: Some(neglect), ..Options::default() };
        let noticed = (0..400).find_map(|seed| run(seed, options).err());
        let noticed = noticed.unwrap_or_else(|| panic!("400 seeds did not notice {neglect:?}"));
        assert!(noticed.what.contains(words), "{neglect:?}: {noticed}");
    }
}
