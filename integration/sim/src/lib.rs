//! baton-sim: seeded runs of the protocol in the simulator
