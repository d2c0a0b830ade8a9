//! The shell around the protocol: threads, clock, handshake listener and registration
