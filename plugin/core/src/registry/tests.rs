use baton_fabric::{Keys, MemoryKind};
use proptest::prelude::*;

use super::*;
use crate::wire::samples;

const OWN: Instance = Instance([0xee; 16]);

fn registry() -> Registry {
    Registry::new(OWN, "me", RegistryLimits::default()).unwrap()
}

fn memory(addr: u64, len_bytes: u64) -> Memory {
    Memory {
        addr,
        len_bytes,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    }
}

fn keys(n: u64) -> [RegionKeys; 2] {
    [n, n + 1].map(|n| RegionKeys::whole(Keys { local: n, remote: n + 100 }))
}

fn on(keys: &[RegionKeys; 2]) -> [(&'static str, &RegionKeys); 2] {
    [("local", &keys[0]), ("tcp", &keys[1])]
}

fn info(name: &str, instance: u8) -> ConnInfo {
    ConnInfo { name: name.into(), instance: Instance([instance; 16]), ..samples::conn_info() }
}

fn blob(instance: u8, region: u64) -> Vec<u8> {
    RegionBlob { instance: Instance([instance; 16]), region: RegionId(region), ..samples::region_blob() }
        .encode()
        .unwrap()
}

#[test]
fn equal_and_overlapping_registrations_are_independent() {
    let mut registry = registry();
    let a = registry.add_local(memory(0x1000, 64), &on(&keys(1)), 7).unwrap();
    let b = registry.add_local(memory(0x1000, 64), &on(&keys(2)), 7).unwrap();
    let c = registry.add_local(memory(0x1020, 64), &on(&keys(3)), 7).unwrap();
    assert!(a != b && b != c && a != c);
    let exported = registry.export(b).unwrap().to_vec();
    assert_ne!(registry.export(a).unwrap(), exported, "unique per registration");
    let gone = registry.remove_local(a).unwrap();
    assert!(gone.is_revoked() && registry.local(a).is_none() && registry.remove_local(a).is_none());
    assert!(!registry.local(b).unwrap().is_revoked());
    assert_eq!(registry.export(b).unwrap(), exported, "stable");
    let tcp = RegionBlob::decode(registry.export(c).unwrap()).unwrap().key("tcp", 0, 63);
    assert_eq!(tcp, Some(104));
    let decoded = RegionBlob::decode(&exported).unwrap();
    assert_eq!(
        (decoded.instance, decoded.region, decoded.base),
        (OWN, registry.local(b).unwrap().id(), 0x1000)
    );
    assert_eq!(decoded.fabrics, [samples::one_key("local", 102), samples::one_key("tcp", 103)]);
}

#[test]
fn a_region_that_peers_may_not_touch_tells_no_key() {
    let mut registry = registry();
    let private = Memory { remote_read: false, remote_write: false, ..memory(1, 1) };
    let handle = registry.add_local(private, &on(&keys(1)), 7).unwrap();
    assert_eq!(RegionBlob::decode(registry.export(handle).unwrap()).unwrap().fabrics, []);
}

#[test]
fn a_reused_slot_does_not_answer_to_the_old_handle() {
    let mut registry = registry();
    let old = registry.add_local(memory(1, 1), &on(&keys(1)), 7).unwrap();
    registry.remove_local(old);
    let new = registry.add_local(memory(1, 1), &on(&keys(1)), 7).unwrap();
    assert_ne!(old, new);
    assert!(registry.local(old).is_none() && registry.local(new).is_some());
    let first = registry.import("p", &blob(1, 5)).unwrap().0;
    assert!(registry.release(first) && !registry.release(first));
    let second = registry.import("p", &blob(1, 5)).unwrap().0;
    assert_ne!(first, second);
    assert!(matches!(registry.resolve(first), Err(ResolveError::NotFound(_))));
    assert!(registry.local(second).is_none(), "handles of the two kinds never meet");
}

#[test]
fn memory_that_is_empty_or_beyond_the_address_space_is_refused_and_takes_no_slot() {
    let mut registry = registry();
    assert!(registry.add_local(memory(5, 0), &on(&keys(1)), 7).is_err());
    assert!(registry.add_local(memory(u64::MAX, 2), &on(&keys(1)), 7).is_err());
    assert_eq!(registry.counts().local_regions, 0);
    registry.add_local(memory(5, 1), &on(&keys(1)), 7).unwrap();
}

#[test]
fn bounds_are_checked_without_overflow() {
    let mut registry = registry();
    let handle = registry.add_local(memory(1000, 100), &on(&keys(1)), 7).unwrap();
    let region = registry.local(handle).unwrap();
    for (addr, len) in [(1000, 100), (1000, 0), (1100, 0), (1099, 1)] {
        assert!(region.contains(addr, len), "{addr} {len}");
    }
    for (addr, len) in
        [(999, 1), (1000, 101), (1101, 0), (1099, 2), (u64::MAX, 2), (1001, u64::MAX), (1100, 1)]
    {
        assert!(!region.contains(addr, len), "{addr} {len}");
    }
}

#[test]
fn a_name_is_bound_by_connection_information_only() {
    let mut registry = registry();
    assert_eq!(registry.load_remote(Some("p"), info("p", 1)), Ok(LoadEffect::New));
    assert_eq!(registry.load_remote(None, info("p", 1)), Ok(LoadEffect::Same));
    let old = Instance([1; 16]);
    assert_eq!(registry.load_remote(Some("p"), info("p", 2)), Ok(LoadEffect::ReplacedInstance { old }));
    assert_eq!(registry.bound("p").unwrap().instance, Instance([2; 16]));
    assert!(registry.bound_instance(&old).is_none() && registry.bound_instance(&Instance([2; 16])).is_some());
    let other = registry.load_remote(Some("q"), info("p", 1)).unwrap_err();
    assert_eq!(other.to_string(), "this connection information is of agent \"p\", not of \"q\"");
    assert_eq!(registry.disconnect("p"), Some(Instance([2; 16])));
    assert_eq!((registry.disconnect("p"), registry.disconnect("never seen")), (None, None));
    assert_eq!(registry.counts().peers, 0);
    assert_eq!(registry.load_remote(None, info("p", 2)), Ok(LoadEffect::New));
}

#[test]
fn our_own_name_and_instance_are_recognised() {
    let mut registry = registry();
    let own = ConnInfo { name: "me".into(), instance: OWN, ..samples::conn_info() };
    assert_eq!(registry.load_remote(Some("me"), own), Ok(LoadEffect::Own));
    assert!(matches!(registry.load_remote(None, info("me", 1)), Err(RegistryError::OwnName { .. })));
    let handle = registry.add_local(memory(0x1000, 64), &on(&keys(1)), 7).unwrap();
    let exported = registry.export(handle).unwrap().to_vec();
    let (imported, binding) = registry.import("me", &exported).unwrap();
    assert_eq!(binding, Binding::Bound);
    let Ok(Resolved::Own(local)) = registry.resolve(imported) else { panic!("not our own region") };
    assert_eq!(local.handle, handle);
    registry.remove_local(handle);
    assert!(matches!(registry.resolve(imported), Err(ResolveError::Revoked { .. })));
    let (stranger, _) = registry.import("me", &blob(1, 5)).unwrap();
    assert!(matches!(registry.resolve(stranger), Err(ResolveError::Stale { .. })));
    let (posing, _) = registry.import("p", &exported).unwrap();
    assert!(matches!(registry.resolve(posing), Err(ResolveError::Unbound { .. })));
}

#[test]
fn a_region_may_come_before_its_owners_connection_information() {
    let mut registry = registry();
    let (handle, binding) = registry.import("p", &blob(1, 5)).unwrap();
    assert_eq!(binding, Binding::Unbound);
    let text = registry.resolve(handle).unwrap_err().to_string();
    assert!(text.contains("connection information of agent \"p\" is not loaded"), "{text}");
    registry.load_remote(None, info("p", 1)).unwrap();
    let Ok(Resolved::Remote(region)) = registry.resolve(handle) else { panic!("not bound") };
    assert_eq!((&*region.name, region.blob.region), ("p", RegionId(5)));
}

#[test]
fn regions_of_an_earlier_instance_are_stale_and_work_again_when_it_is_bound_again() {
    let mut registry = registry();
    registry.load_remote(None, info("p", 1)).unwrap();
    let (old, _) = registry.import("p", &blob(1, 5)).unwrap();
    let (new, binding) = registry.import("p", &blob(2, 5)).unwrap();
    assert_eq!(binding, Binding::Stale);
    registry.load_remote(None, info("p", 2)).unwrap();
    let text = registry.resolve(old).unwrap_err().to_string();
    assert!(text.contains("import its region again"), "{text}");
    assert!(registry.resolve(new).is_ok());
    registry.disconnect("p");
    assert!(matches!(registry.resolve(new), Err(ResolveError::Unbound { .. })));
    registry.load_remote(None, info("p", 1)).unwrap();
    assert!(registry.resolve(old).is_ok() && registry.resolve(new).is_err());
}

#[test]
fn imports_of_one_region_are_independent_and_outlive_their_handles() {
    let mut registry = registry();
    registry.load_remote(None, info("p", 1)).unwrap();
    let (a, _) = registry.import("p", &blob(1, 5)).unwrap();
    let (b, _) = registry.import("p", &blob(1, 5)).unwrap();
    assert_ne!(a, b);
    let Ok(Resolved::Remote(kept)) = registry.resolve(a) else { panic!("not bound") };
    registry.release(a);
    assert!(registry.resolve(b).is_ok());
    assert!(kept.contains(kept.blob.base, 1) && !kept.is_revoked());
}

#[test]
fn a_withdrawn_region_is_refused_in_every_handle_request_and_late_import() {
    let mut registry = registry();
    registry.load_remote(None, info("p", 1)).unwrap();
    let handles = [5, 5, 6].map(|region| registry.import("p", &blob(1, region)).unwrap().0);
    let Ok(Resolved::Remote(held)) = registry.resolve(handles[0]) else { panic!("not bound") };
    assert!(registry.revoke(Instance([9; 16]), &[RegionId(5)]).is_empty(), "somebody else's region");
    assert_eq!(registry.revoke(Instance([1; 16]), &[RegionId(5), RegionId(77)]).len(), 2);
    assert!(held.is_revoked());
    assert!(matches!(registry.resolve(handles[0]), Err(ResolveError::Revoked { .. })));
    assert!(matches!(registry.resolve(handles[1]), Err(ResolveError::Revoked { .. })));
    assert!(registry.resolve(handles[2]).is_ok());
    let (late, _) = registry.import("p", &blob(1, 5)).unwrap();
    assert!(matches!(registry.resolve(late), Err(ResolveError::Revoked { .. })));
}

#[test]
fn each_limit_is_refused_by_name_and_counted() {
    let limits = RegistryLimits { local_regions: 1, peers: 1, remote_regions: 2 };
    let mut registry = Registry::new(OWN, "me", limits).unwrap();
    registry.add_local(memory(1, 1), &on(&keys(1)), 7).unwrap();
    let full = |what, limit| Err(RegistryError::Limit { what, limit });
    assert_eq!(
        registry.add_local(memory(1, 1), &on(&keys(1)), 7),
        full("local_regions", 1).map(|()| RegionHandle(0))
    );
    registry.load_remote(None, info("p", 1)).unwrap();
    assert_eq!(
        registry.load_remote(None, info("q", 2)),
        Err(RegistryError::Limit { what: "peers", limit: 1 })
    );
    let handle = registry.import("p", &blob(1, 1)).unwrap().0;
    assert!(matches!(registry.import("q", &blob(2, 1)), Err(RegistryError::Limit { what: "peers", .. })));
    registry.import("p", &blob(1, 1)).unwrap();
    assert!(matches!(
        registry.import("p", &blob(1, 1)),
        Err(RegistryError::Limit { what: "remote_regions", .. })
    ));
    let counts = registry.counts();
    let expected =
        RegistryCounts { local_regions: 1, bound_peers: 1, peers: 1, remote_regions: 2, refused: 4 };
    assert_eq!(counts, expected);
    registry.release(handle);
    registry.import("p", &blob(1, 1)).unwrap();
}

#[test]
fn bad_names_and_blobs_are_refused() {
    assert!(Registry::new(OWN, "a\0", RegistryLimits::default()).is_err());
    let mut registry = registry();
    assert!(matches!(registry.import("", &blob(1, 1)), Err(RegistryError::Name(NameError::Empty))));
    assert!(matches!(registry.import("p", b"garbage"), Err(RegistryError::Blob(RegionBlobError::Magic))));
    assert_eq!(registry.counts().peers, 0, "a refused import leaves no name behind");
}

#[derive(Clone, Debug)]
enum Step {
    Load(u8, u8),
    Disconnect(u8),
    Import(u8, u8, u8),
    Release(prop::sample::Index),
    Revoke(u8, u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3u8, 1..4u8).prop_map(|(name, instance)| Step::Load(name, instance)),
        (0..3u8).prop_map(Step::Disconnect),
        (0..3u8, 1..4u8, 1..4u8).prop_map(|(name, instance, region)| Step::Import(name, instance, region)),
        any::<prop::sample::Index>().prop_map(Step::Release),
        (1..4u8, 1..4u8).prop_map(|(instance, region)| Step::Revoke(instance, region)),
    ]
}

proptest! {
    /// The registry against the plainest description of itself.
    #[test]
    fn a_handle_is_usable_exactly_when_bound_to_its_instance_and_not_withdrawn(
        steps in prop::collection::vec(any_step(), 0..120),
    ) {
        let mut registry = registry();
        let mut bound = [None; 3];
        let mut handles: Vec<(RegionHandle, u8, u8, u8)> = vec![];
        let mut withdrawn = std::collections::HashSet::new();
        let name = |n: u8| format!("p{n}");
        for step in steps {
            match step {
                Step::Load(n, instance) => {
                    registry.load_remote(None, info(&name(n), instance)).unwrap();
                    bound[usize::from(n)] = Some(instance);
                }
                Step::Disconnect(n) => {
                    let gone = registry.disconnect(&name(n));
                    prop_assert_eq!(gone, bound[usize::from(n)].take().map(|i| Instance([i; 16])));
                }
                Step::Import(n, instance, region) => {
                    let (handle, _) = registry.import(&name(n), &blob(instance, u64::from(region))).unwrap();
                    handles.push((handle, n, instance, region));
                }
                Step::Release(index) if !handles.is_empty() => {
                    let (handle, ..) = handles.swap_remove(index.index(handles.len()));
                    prop_assert!(registry.release(handle));
                    prop_assert_eq!(registry.resolve(handle).unwrap_err(), ResolveError::NotFound(handle.0));
                }
                Step::Release(_) => {}
                Step::Revoke(instance, region) => {
                    registry.revoke(Instance([instance; 16]), &[RegionId(u64::from(region))]);
                    withdrawn.insert((instance, region));
                }
            }
            for (handle, n, instance, region) in &handles {
                let usable = bound[usize::from(*n)] == Some(*instance) && !withdrawn.contains(&(*instance, *region));
                prop_assert_eq!(registry.resolve(*handle).is_ok(), usable);
            }
            let names = (0..3u8).filter(|n| bound[usize::from(*n)].is_some() || handles.iter().any(|h| h.1 == *n));
            prop_assert_eq!(registry.counts().peers, names.count());
            prop_assert_eq!(registry.counts().remote_regions, handles.len());
        }
    }
}

#[test]
fn a_revocation_reaches_imports_that_were_released_and_are_still_held() {
    let mut registry = registry();
    registry.load_remote(None, info("p", 1)).unwrap();
    let held: Vec<_> = (0..100)
        .map(|n| {
            let handle = registry.import("p", &blob(1, n)).unwrap().0;
            let Resolved::Remote(region) = registry.resolve(handle).unwrap() else { panic!("a peer's") };
            assert!(registry.release(handle));
            region
        })
        .collect();
    assert_eq!(registry.revoke(Instance([1; 16]), &[RegionId(7)]).len(), 1);
    let revoked: Vec<_> = held.iter().map(|region| region.is_revoked()).collect();
    assert_eq!(revoked.iter().position(|is| *is), Some(7));
    assert_eq!(revoked.iter().filter(|is| **is).count(), 1);
    drop(held);
    assert!(registry.revoke(Instance([1; 16]), &[RegionId(8)]).is_empty(), "nobody holds it any more");
    for n in 1000..10_000 {
        let handle = registry.import("p", &blob(1, n)).unwrap().0;
        let region = registry.resolve(handle).unwrap();
        assert!(registry.release(handle));
        drop(region);
    }
    assert!(registry.held.len() < 1000, "what nobody holds is forgotten: {}", registry.held.len());
}
