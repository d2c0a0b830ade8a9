//! The C compiler, with the headers, and Rust agree about every structure, constant and function of libibverbs that the crate
//! uses. One list makes both the C program and Rust's answers.

use baton_verbs::{Api, sys};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::path::PathBuf;
use std::process::Command;

/// What is compared: a C expression of an integer, and Rust's value.
type Facts = Vec<(String, u64)>;

const fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Structures: size, alignment, and of each field its offset and size. A field that C calls otherwise is `rust = "c"`.
macro_rules! structs {
    ($facts:ident; $($name:ident { $($field:ident $(= $c:literal)?),* $(,)? })*) => {$(
        let name = concat!("struct ", stringify!($name));
        $facts.push((format!("sizeof({name})"), size_of::<sys::$name>() as u64));
        $facts.push((format!("_Alignof({name})"), align_of::<sys::$name>() as u64));
        $(
            let field = [stringify!($field) $(, $c)?];
            let field = field[field.len() - 1];
            $facts.push((format!("offsetof({name}, {field})"), offset_of!(sys::$name, $field) as u64));
            // SAFETY: the closure is never called; borrowing a field of a union, which C's unions are here, needs the word.
            #[allow(unused_unsafe)]
            let size = size_of_field::<sys::$name, _>(|it| unsafe { &it.$field });
            $facts.push((format!("sizeof((({name} *)0)->{field})"), size as u64));
        )*
    )*};
}

/// Constants by the module or type that Rust keeps them in.
macro_rules! constants {
    ($($module:ident { $($name:ident),* $(,)? })*) => {
        vec![$($((stringify!($name).to_owned(), number!($module $name)),)*)*]
    };
}

/// Constants of a module are integers, of a flags type a wrapped one, of the event type a variant.
macro_rules! number {
    (ibv_event_type $name:ident) => {
        sys::ibv_event_type::$name as u64
    };
    (ibv_access_flags $name:ident) => {
        u64::from(sys::ibv_access_flags::$name.0)
    };
    (ibv_send_flags $name:ident) => {
        u64::from(sys::ibv_send_flags::$name.0)
    };
    (ibv_wc_flags $name:ident) => {
        u64::from(sys::ibv_wc_flags::$name.0)
    };
    (ibv_qp_attr_mask $name:ident) => {
        u64::from(sys::ibv_qp_attr_mask::$name.0)
    };
    (crate_root $name:ident) => {
        sys::$name as u64
    };
    ($module:ident $name:ident) => {
        sys::$module::$name as u64
    };
}

fn structures() -> Facts {
    let mut facts = Facts::new();
    structs! { facts;
        ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        verbs_context { query_port, sz, context }
        ibv_device_attr {
            fw_ver, node_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, max_qp, max_qp_wr, device_cap_flags, max_sge,
            max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_qp_init_rd_atom, max_pkeys, phys_port_cnt,
        }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, pkey_tbl_len, lid, sm_lid, active_width,
            active_speed, phys_state, link_layer, flags, port_cap_flags2,
        }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_async_event { element, event_type }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, cqe, comp_events_completed, async_events_completed }
        ibv_qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, events_completed,
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr,
            pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
        }
        ibv_sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data_invalidated_rkey_union = "imm_data", wr, qp_type,
            bind_mw_tso_union = "bind_mw",
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data_invalidated_rkey_union = "imm_data", qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits,
        }
    }
    // Inside the union of a work request.
    let wr = offset_of!(sys::ibv_send_wr, wr);
    for (field, offset) in
        [("remote_addr", offset_of!(sys::rdma_t, remote_addr)), ("rkey", offset_of!(sys::rdma_t, rkey))]
    {
        facts.push((format!("offsetof(struct ibv_send_wr, wr.rdma.{field})"), (wr + offset) as u64));
    }
    facts.push(("sizeof(union ibv_gid)".to_owned(), size_of::<sys::ibv_gid>() as u64));
    facts
}

fn constants() -> Facts {
    let mut facts: Facts = constants! {
        ibv_wc_status {
            IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR,
            IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
        }
        ibv_wc_opcode {
            IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM,
        }
        ibv_wc_flags { IBV_WC_WITH_IMM }
        ibv_wr_opcode { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_RDMA_READ }
        ibv_send_flags { IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_INLINE }
        ibv_access_flags {
            IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC,
            IBV_ACCESS_RELAXED_ORDERING,
        }
        ibv_qp_state {
            IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR,
        }
        ibv_qp_type { IBV_QPT_RC }
        ibv_qp_attr_mask {
            IBV_QP_STATE, IBV_QP_CUR_STATE, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_AV, IBV_QP_PATH_MTU,
            IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER,
            IBV_QP_SQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_DEST_QPN,
        }
        ibv_mtu { IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 }
        ibv_port_state { IBV_PORT_DOWN, IBV_PORT_ACTIVE, IBV_PORT_ACTIVE_DEFER }
        ibv_transport_type { IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP }
        ibv_event_type {
            IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_DEVICE_FATAL,
            IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE,
            IBV_EVENT_GID_CHANGE,
        }
        crate_root { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 }
    };
    // Numbers that the crate writes itself.
    facts.extend([
        ("IBV_LINK_LAYER_INFINIBAND".to_owned(), 1),
        ("IBV_LINK_LAYER_ETHERNET".to_owned(), 2),
        ("(uintptr_t)__VERBS_ABI_IS_EXTENDED".to_owned(), usize::MAX as u64),
    ]);
    facts
}

/// A type as C writes it.
fn in_c(rust: &str) -> String {
    if let Some(pointed) = rust.strip_prefix("*mut ") {
        return format!("{} *", in_c(pointed));
    }
    if let Some(pointed) = rust.strip_prefix("*const ") {
        return format!("const {} *", in_c(pointed));
    }
    match rust {
        "" => "void",
        "u8" => "uint8_t",
        "u16" => "uint16_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_char" => "char",
        "c_void" => "void",
        "ibv_gid" => "union ibv_gid",
        structure => return format!("struct {structure}"),
    }
    .to_owned()
}

fn compile(name: &str, source: &str, link: bool) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (file, out) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&file, source).expect("the target directory is writable");
    // Linking Rust needs a C compiler too, so there is one.
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(&compiler);
    command.args(["-std=gnu11", "-Wall", "-Werror", "-Wno-unused-variable"]);
    if !link {
        command.arg("-c");
    }
    let ran = command.arg("-o").arg(&out).arg(&file).output().unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(ran.status.success(), "{compiler} {name}.c:\n{}", String::from_utf8_lossy(&ran.stderr));
    out
}

const HEADERS: &str = "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdint.h>\n";

#[test]
fn c_and_rust_agree_about_structures_and_constants() {
    let facts: Facts = structures().into_iter().chain(constants()).collect();
    let mut source = format!("{HEADERS}#include <stdio.h>\nint main(void) {{\n");
    for (expression, _) in &facts {
        writeln!(source, "printf(\"%llu %s\\n\", (unsigned long long)({expression}), \"{expression}\");")
            .expect("a string");
    }
    source += "return 0;\n}\n";
    let program = compile("layout", &source, true);
    let ran = Command::new(program).output().expect("the program runs");
    let printed = String::from_utf8(ran.stdout).expect("text");
    let in_c: BTreeMap<&str, u64> = printed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(value, expression)| (expression, value.parse().expect("a number")))
        .collect();
    let differing: Vec<String> = facts
        .iter()
        .filter(|(expression, value)| in_c[expression.as_str()] != *value)
        .map(|(expression, value)| format!("{expression}: C {}, Rust {value}", in_c[expression.as_str()]))
        .collect();
    assert!(differing.is_empty(), "{differing:#?}");
    assert!(facts.len() > 300, "only {} facts were compared", facts.len());
}

#[test]
fn functions_have_the_types_that_they_are_called_with() {
    let mut source = HEADERS.to_owned();
    let exported = Api::SIGNATURES.iter().filter(|(symbol, ..)| symbol.contains("ibv_"));
    for (i, (symbol, arguments, answer)) in exported.enumerate() {
        let arguments: Vec<String> = arguments.iter().map(|argument| in_c(argument)).collect();
        let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
        // In brackets it is the function, not a macro of the same name.
        writeln!(source, "{} (*function_{i})({arguments}) = ({symbol});", in_c(answer)).expect("a string");
    }
    assert!(source.lines().count() > 25, "{source}");
    compile("prototypes", &source, false);
    let wrong = format!("{HEADERS}int (*function)(struct ibv_cq *) = (ibv_destroy_qp);");
    assert!(std::panic::catch_unwind(|| compile("wrong", &wrong, false)).is_err(), "the compiler compares");
}
