//! Software fabric over TCP, for peers on other hosts and where the kernel forbids the local one.
