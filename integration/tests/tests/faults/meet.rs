//! Many processes start, learn each other and connect at the same time.

use baton_tests::{Agent, hex};
use serde_json::json;

use crate::{agent_program, on_each_fabric};

const PROCESSES: usize = 8;
const PLACE: usize = 64 << 10;

on_each_fabric! {
    fn eight_processes_open_and_connect_to_each_other_at_once(fabric) {
        let name = |i: usize| format!("agent-{i}");
        let start = |i| Agent::start_without_waiting(&mut agent_program(fabric), &name(i));
        let mut agents: Vec<Agent> = (0..PROCESSES).map(start).collect();
        let mut cards = Vec::new();
        for agent in &mut agents {
            agent.ready();
            let (info, inbox) = (agent.info(), agent.block(PROCESSES * PLACE, 999));
            cards.push(json!({ "name": agent.name(), "info": hex(&info), "blob": hex(&inbox.blob), "addr": inbox.addr }));
        }
        for (own, agent) in agents.iter_mut().enumerate() {
            let others = cards.iter().enumerate().filter(|(i, _)| *i != own).map(|(_, card)| card.clone());
            let peers: Vec<_> = others.collect();
            agent.tell(json!({ "do": "meet", "own": own, "place": PLACE, "inbox": 0, "peers": peers }));
        }
        for (own, agent) in agents.iter_mut().enumerate() {
            let met = agent.answer();
            let others: Vec<_> = (0..PROCESSES).filter(|i| *i != own).map(name).collect();
            assert_eq!(met, json!({ "heard": others, "sessions": PROCESSES - 1 }), "agent {own}");
        }
        agents.into_iter().for_each(Agent::end);
    }
}
