//! A software NIC for hosts without one: same-host copies and TCP
