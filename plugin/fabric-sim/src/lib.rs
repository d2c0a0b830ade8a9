//! A seeded simulator fabric: memory, clock, faults and checkers
