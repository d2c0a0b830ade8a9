//! baton-bench: two-process benchmarks of Baton and its peers
