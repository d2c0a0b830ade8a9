//! One suite for every [`Fabric`](crate::Fabric).
//!
//! A fabric proves itself with one line in its tests, where the expression builds a fresh [`Harness`]:
//!
//! ```ignore
//! baton_fabric::conformance_tests!(InProcess::new(fabric_a(), fabric_b()));
//! ```
//!
//! Each behaviour is a test of its own with a watchdog. Nothing here asserts how long something takes.

mod data;
mod errors;
mod gather;
mod harness;
mod heads;
mod life;
mod order;
mod receive;
mod revoke;
mod rig;
mod wake;

pub use harness::{Harness, InProcess};

use rig::Rig;
use std::sync::mpsc;
use std::time::Duration;

/// A test that has not ended by then has hung; times `BATON_TIMEOUT_SCALE`, for machines that are emulated.
const WATCHDOG: Duration = Duration::from_secs(90);

/// What waits are multiplied with.
fn timeout_scale() -> u32 {
    std::env::var("BATON_TIMEOUT_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

/// Runs one behaviour on a thread of its own, so that a call that never returns fails the test instead of blocking the run.
fn guarded(name: &'static str, harness: Box<dyn Harness>, behaviour: fn(&Rig)) {
    let (done, ended) = mpsc::channel();
    let body = std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            let rig = Rig::new(harness);
            behaviour(&rig);
            drop(rig);
            let _ = done.send(());
        })
        .expect("a thread for the test");
    let watchdog = WATCHDOG * timeout_scale();
    if ended.recv_timeout(watchdog) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!(
            "{name}: not finished after {watchdog:?}; a call into the fabric hangs or an event never comes"
        );
    }
    if let Err(panic) = body.join() {
        std::panic::resume_unwind(panic);
    }
}

macro_rules! behaviours {
    ($($module:ident :: { $($name:ident),* $(,)? })*) => {
        /// The behaviours by name; [`conformance_tests!`](crate::conformance_tests) makes a test of each.
        pub mod behaviour {
            $($(
                #[doc = concat!("Behaviour `", stringify!($name), "`.")]
                pub fn $name(harness: impl super::Harness) {
                    super::guarded(stringify!($name), Box::new(harness), super::$module::$name);
                }
            )*)*
        }

        /// Instantiates the suite: one `#[test]` per behaviour, each on a fresh harness; with an attribute before the
        /// harness, every test gets it: `#[ignore = "needs a device"] harness()`.
        #[macro_export]
        macro_rules! conformance_tests {
            (#[$attribute:meta] $harness:expr) => {
                $($(
                    #[test]
                    #[$attribute]
                    fn $name() {
                        $crate::conformance::behaviour::$name($harness);
                    }
                )*)*
            };
            ($harness:expr) => {
                $($(
                    #[test]
                    fn $name() {
                        $crate::conformance::behaviour::$name($harness);
                    }
                )*)*
            };
        }
    };
}

behaviours! {
    data::{
        each_fabric_reaches_the_other,
        a_write_places_exactly_its_bytes_at_every_odd_size,
        a_read_places_exactly_its_bytes_at_every_odd_size,
        many_unaligned_pieces_land_each_in_its_place,
        sixty_four_mebibytes_arrive_whole,
        sixty_four_mebibytes_are_read_whole,
        both_directions_at_once_do_not_disturb_each_other,
        the_target_application_need_not_call_anything,
        the_control_endpoint_carries_data_like_any_other,
        inline_bytes_may_be_overwritten_right_after_post,
        memory_of_the_engines_own_is_written_like_any_other,
        staged_bytes_are_written_from_registered_memory,
        registrations_that_overlap_or_repeat_are_independent,
    }
    order::{
        completions_come_in_order_and_only_for_signaled_batches,
        a_full_send_queue_drains_and_fills_again,
        a_fenced_extra_waits_for_the_reads_before_it,
        a_later_write_overwrites_an_earlier_one,
        short_extras_and_writes_to_the_same_place_keep_their_order,
        an_immediate_with_a_short_payload_never_comes_before_the_data_in_front_of_it,
        every_completion_is_handed_out_once_to_several_polling_threads,
        endpoints_may_be_posted_to_from_several_threads,
    }
    receive::{
        an_immediate_comes_after_its_bytes_and_consumes_one_recv,
        the_last_template_of_a_chain_carries_the_immediate,
        an_extra_write_carries_an_immediate,
        a_zero_length_write_delivers_its_immediate,
        immediates_arrive_in_the_order_of_posting,
        sends_fill_the_slots_in_order_with_id_and_length,
        an_empty_send_fits_an_empty_slot,
        a_staged_send_arrives_whole,
        recvs_may_be_posted_before_connecting,
        a_send_longer_than_its_slot_is_refused,
        an_immediate_without_a_recv_is_refused,
        a_send_without_a_recv_is_refused,
    }
    gather::{
        a_gathered_send_arrives_in_the_order_of_its_pieces,
        pieces_without_length_are_left_out,
        gathered_sends_of_every_length_fill_their_slots_among_other_work,
        a_gathered_send_with_a_wrong_local_key_is_a_local_error,
        a_gathered_send_from_outside_a_region_is_a_local_error,
        a_gathered_send_longer_than_its_slot_is_refused,
        gather_lists_that_no_endpoint_can_send_are_refused_at_post,
        more_gathered_pieces_than_the_queue_is_deep_go_out_in_turn,
    }
    heads::{
        a_message_with_a_head_goes_straight_to_its_place,
        what_is_behind_a_rest_waits_for_it_and_comes_in_order,
        many_rests_are_taken_at_once_as_far_as_they_are_here,
        a_rest_that_is_not_wanted_goes_nowhere,
        a_rest_without_memory_is_told_and_dropped_and_the_next_one_comes,
        after_a_fence_no_rest_is_taken,
        a_message_with_a_head_longer_than_its_slot_is_refused,
    }
    errors::{
        a_wrong_remote_key_is_refused,
        a_deregistered_remote_key_is_refused,
        a_write_past_the_end_of_the_region_is_refused,
        a_write_before_the_start_of_the_region_is_refused,
        a_read_past_the_end_of_the_region_is_refused,
        an_address_that_overflows_is_refused,
        a_region_that_peers_may_only_read_is_not_written,
        a_region_that_peers_may_only_write_is_not_read,
        a_region_for_local_use_is_not_touched_by_peers,
        a_wrong_local_key_is_a_local_error,
        a_local_range_outside_its_region_is_a_local_error,
        an_extra_write_with_a_wrong_key_is_refused,
        an_endpoint_in_error_leaves_others_alone,
        connecting_to_nonsense_is_an_error_by_the_deadline,
    }
    revoke::{
        after_deregister_no_peers_write_lands,
        after_deregister_no_peers_read_sees_new_bytes,
        a_revoked_region_refuses_new_operations,
        deregistering_one_region_leaves_traffic_to_another_alone,
        an_unknown_key_is_not_found_by_deregister,
    }
    life::{
        a_fenced_endpoint_flushes_everything_in_order,
        a_fenced_and_quiet_endpoint_touches_no_memory,
        a_posts_to_a_fenced_endpoint_never_succeeds,
        a_destroyed_endpoint_is_never_heard_of_again,
        a_new_epoch_works_after_the_old_one_was_destroyed,
    }
    wake::{
        a_sleeping_service_thread_is_woken_by_every_message,
        arm_refuses_to_sleep_on_waiting_completions,
        a_poller_does_not_take_the_sleepers_bell,
        what_a_poller_leaves_owing_is_not_forgotten,
        what_nobody_waits_for_completes_all_the_same,
    }
}
