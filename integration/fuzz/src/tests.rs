//! The targets on their seeds, and on every seed with each of its bytes changed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

/// Bytes at the edges of what a field can be.
const EDGES: [u8; 5] = [0, 1, 0x7F, 0x80, 0xFF];

fn run(target: &Target, input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
        panic!("{}: the input is {input:?}", target.name);
    }
}

#[test]
fn every_target_takes_its_own_seeds_and_those_of_the_others() {
    for target in TARGETS {
        let own = (target.seeds)();
        assert!(!own.is_empty(), "{}", target.name);
        for seed in &own {
            assert!(seed.len() <= target.max_len, "{}: a seed of {} bytes", target.name, seed.len());
        }
        for seed in TARGETS.iter().flat_map(|other| (other.seeds)()) {
            run(target, &seed);
        }
        run(target, &[]);
    }
}

#[test]
fn no_byte_of_a_seed_set_to_an_edge_or_cut_off_there_is_a_fault() {
    for target in TARGETS {
        for seed in (target.seeds)() {
            // Of long texts not every byte.
            let step = 1 + seed.len() / 40;
            for at in (0..seed.len()).step_by(step) {
                let mut input = seed.clone();
                for edge in EDGES.into_iter().chain([seed[at].wrapping_add(1)]) {
                    input[at] = edge;
                    run(target, &input);
                }
                run(target, &seed[..at]);
            }
        }
    }
}

#[test]
fn names_are_different_and_fit_a_file_name() {
    let names: std::collections::BTreeSet<_> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names.len(), TARGETS.len());
    assert!(names.iter().all(|name| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-')));
}

#[test]
fn the_dictionary_has_the_keys_of_the_messages() {
    let words = dictionary(&texts::message_seeds());
    for key in ["\"offers\"", "\"HELLO\"", "\"rq_depth\"", "\"resume_token\""] {
        assert!(words.iter().any(|word| word == key), "{key} of {words:?}");
    }
}
